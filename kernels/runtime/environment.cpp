#include "kernels/runtime/environment.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "kernels/runtime/sizes.h"

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
  if (!value) {
    return std::nullopt;
  }
  std::int64_t number = 0;
  const char* const last = value->data() + value->size();
  const auto [end, error] = std::from_chars(value->data(), last, number);
  if (error != std::errc{} || end != last) {
    refuse(name, *value, "a whole number");
  }
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
