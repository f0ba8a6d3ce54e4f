#include "zero/comm/on_all_ranks.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <sstream>
#include <vector>

#include "zero/comm/texts.h"

namespace ballast {
namespace {

struct Failure {
  Code code = Code::internal;
  Problem problem{};
};

std::optional<Failure> failure_of(const std::function<void()>& work) {
  try {
    work();
    return {};
  } catch (const Error& error) {
    return Failure{error.code(), error.problem()};
  } catch (const std::filesystem::filesystem_error& error) {
    return Failure{Code::file_call, {.what = error.code().message(), .where = error.path1().string()}};
  } catch (const std::exception& error) {
    return Failure{Code::internal, {.what = error.what()}};
  }
}

constexpr char between_fields = '\0';

std::string to_text(const Failure& failure) {
  const auto& [what, where, needed, available, remedy] = failure.problem;
  std::string text = std::to_string(static_cast<int>(failure.code));
  for (const std::string& field : {what, where, needed, available, remedy})
    (text += between_fields) += field;
  return text;
}

Failure failure_from(const std::string& text) {
  std::istringstream fields(text);
  const auto next = [&] {
    std::string field;
    std::getline(fields, field, between_fields);
    return field;
  };
  Failure failure{.code = static_cast<Code>(std::stoi(next()))};
  auto& [what, where, needed, available, remedy] = failure.problem;
  for (std::string* field : {&what, &where, &needed, &available, &remedy})
    *field = next();
  return failure;
}

}  // namespace

void on_all_ranks(Communicator& world, const std::function<void()>& work) {
  if (world.size() == 1) return work();
  const std::optional<Failure> own = failure_of(work);
  const std::string text = own ? to_text(*own) : std::string();
  std::vector<std::int64_t> bytes(world.size());  // of each rank's message
  bytes[world.rank()] = static_cast<std::int64_t>(text.size());
  world.all_reduce(bytes);
  const auto first = std::ranges::find_if(bytes, [](std::int64_t each) { return each > 0; });
  if (first == bytes.end()) return;
  const auto rank = static_cast<std::size_t>(first - bytes.begin());
  Failure failure = failure_from(broadcast_text(world, text, rank));
  std::string& where = failure.problem.where;
  where = where.empty() ? fmt::format("rank {}", rank) : fmt::format("rank {}: {}", rank, where);
  fail(failure.code, failure.problem);
}

}  // namespace ballast
