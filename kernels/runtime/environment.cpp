#include "kernels/runtime/environment.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <cstdlib>
#include <string_view>

#include "kernels/runtime/sizes.h"
#include "kernels/runtime/system_files.h"

namespace ballast {
namespace {

std::optional<std::string> of_this_process(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

[[noreturn]] void refuse(const std::string& name, const std::string& value, std::string_view needed) {
  fail(Code::bad_environment,
       {.what = fmt::format("cannot read {}=\"{}\"", name, value), .needed = std::string(needed)});
}

}  // namespace

Environment::Environment() : lookup_(of_this_process) {}

std::optional<std::string> Environment::text(const std::string& name) const {
  std::optional<std::string> value = lookup_(name);
  return value && value->empty() ? std::nullopt : value;
}

std::optional<std::int64_t> Environment::integer(const std::string& name) const {
  const std::optional<std::string> value = text(name);
  if (!value) return std::nullopt;
  const auto number = whole_number<std::int64_t>(*value);
  if (!number) refuse(name, *value, "a whole number");
  return number;
}

std::optional<std::size_t> Environment::bytes(const std::string& name) const {
  const std::optional<std::string> value = text(name);
  if (!value) return std::nullopt;
  try {
    return parse_bytes(*value);
  } catch (const Error&) {
    refuse(name, *value, "a size, such as 120GiB");
  }
}

}  // namespace ballast
