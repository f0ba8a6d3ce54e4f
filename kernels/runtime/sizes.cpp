#include "kernels/runtime/sizes.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdint>

namespace ballast {
namespace {

struct Unit {
  std::string_view name;
  long double bytes;
};

constexpr std::array units{
    Unit{"", 1},          Unit{"b", 1},         Unit{"kib", 0x1p10L}, Unit{"mib", 0x1p20L},
    Unit{"gib", 0x1p30L}, Unit{"tib", 0x1p40L}, Unit{"pib", 0x1p50L}, Unit{"kb", 1e3L},
    Unit{"mb", 1e6L},     Unit{"gb", 1e9L},     Unit{"tb", 1e12L},    Unit{"pb", 1e15L},
};

constexpr std::string_view blanks = " \t\n";

std::string_view trim(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(blanks), text.size()));
  return text.substr(0, text.find_last_not_of(blanks) + 1);
}

std::string lower(std::string_view text) {
  std::string result(text);
  std::ranges::transform(result, result.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return result;
}

[[noreturn]] void refuse(std::string_view text, std::string_view why) {
  fail(Code::bad_argument,
       {.what = fmt::format("cannot read the size \"{}\": it {}", text, why),
        .remedy = "Write a number and a unit: 512MiB, 1.5GiB (powers of 1024), 40GB, 1e9 (of 1000)."});
}

}  // namespace

std::string human_bytes(std::size_t bytes) {
  constexpr std::array names{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1023.5 && !(unit == 0 && bytes < 1024)) {  // 1023.5 would be printed as 1024
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.4g} {}", value, names[unit]);
}

std::size_t parse_bytes(std::string_view text) {
  const std::string_view trimmed = trim(text);
  long double number = 0;
  const auto [end, error] = std::from_chars(trimmed.data(), trimmed.data() + trimmed.size(), number);
  if (error != std::errc{} || !std::isfinite(number) || std::signbit(number)) {
    refuse(text, "does not begin with a number of zero or more");
  }
  const std::string unit_name = lower(trim(trimmed.substr(static_cast<std::size_t>(end - trimmed.data()))));
  const auto* unit = std::ranges::find(units, unit_name, &Unit::name);
  if (unit == units.end()) {
    refuse(text, fmt::format("has the unit \"{}\", which is not known or not clear", unit_name));
  }
  const long double bytes = number * unit->bytes;
  if (bytes >= static_cast<long double>(SIZE_MAX)) {
    refuse(text, "is more than a 64-bit machine can address");
  }
  if (bytes > 0 && bytes < 1) {
    refuse(text, "is less than one byte");
  }
  return static_cast<std::size_t>(bytes);
}

}  // namespace ballast
