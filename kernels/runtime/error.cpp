#include <ballast/error.h>

#include <fmt/format.h>

#include "kernels/runtime/error_codes.h"

namespace ballast {
namespace {

std::string compose(Code code, const Problem& problem, Site site) {
  std::string text = fmt::format("{} {}", label(code), problem.what);
  const auto add = [&text](std::string_view part, std::string_view value) {
    if (!value.empty()) {
      text += fmt::format("\n  {:<11}{}", part, value);
    }
  };
  add("where:", problem.where);
  add("needed:", problem.needed);
  add("available:", problem.available);
  add("remedy:", problem.remedy.empty() ? describe(code).remedy : problem.remedy);
  add("raised at:", fmt::format("{}:{}", site.file, site.line));
  return text;
}

}  // namespace

Error::Error(Code code, const Problem& problem, Site site)
    : std::runtime_error(compose(code, problem, site)), code_(code), problem_(problem) {}

void fail(Code code, const Problem& problem, Site site) {
  switch (static_cast<int>(code) / 1000) {
    case 1: throw UsageError(code, problem, site);
    case 2: throw ResourceError(code, problem, site);
    default: throw FailureError(code, problem, site);
  }
}

}  // namespace ballast
