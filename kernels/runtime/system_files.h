// The kernel's small text files under /proc and /sys, below a root path that tests can replace.
#pragma once

#include <charconv>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace ballast {

// Returns the text without the last newline; nothing if it is unreadable. Throws B2401 if the process has no descriptor
// left, because an unread limit would count as no limit.
std::optional<std::string> read_text(const std::filesystem::path& file);
std::optional<std::size_t> read_number(
    const std::filesystem::path& file);  // nothing also for words such as "max" or "-1"

std::optional<std::size_t> leading_number(std::string_view text);  // "  24684096 kB" gives 24684096

// Nothing if the text is more than a number, or none of this type.
template <class Number>
std::optional<Number> whole_number(std::string_view text) {
  Number number = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, number);
  return error == std::errc{} && stopped == end ? std::optional(number) : std::nullopt;
}

// Returns the number after a key that begins a line: ("MemTotal:   24684096 kB", "MemTotal:").
std::optional<std::size_t> number_after(std::string_view text, std::string_view key);
std::optional<std::size_t> kibibytes_after(std::string_view text, std::string_view key);  // the same, in bytes

std::vector<int> parse_list(std::string_view text);  // "0-2,8" is 0 1 2 8

}  // namespace ballast
