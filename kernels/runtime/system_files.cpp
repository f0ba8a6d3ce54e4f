#include "kernels/runtime/system_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <utility>

#include "kernels/runtime/system_resources.h"

namespace ballast {

std::optional<std::string> read_text(const std::filesystem::path& file) {
  errno = 0;
  const std::ifstream stream(file);
  if (!stream) {
    if (is_descriptor_limit(errno)) fail_limit(fmt::format("cannot read {}", file.string()), errno);
    return std::nullopt;
  }
  std::ostringstream contents;
  contents << stream.rdbuf();
  std::string text = std::move(contents).str();
  while (text.ends_with('\n')) {
    text.pop_back();
  }
  return text;
}

std::optional<std::size_t> leading_number(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
  std::size_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc{} ? std::optional(number) : std::nullopt;
}

std::optional<std::size_t> read_number(const std::filesystem::path& file) {
  const std::optional<std::string> text = read_text(file);
  return text ? leading_number(*text) : std::nullopt;
}

std::optional<std::size_t> number_after(std::string_view text, std::string_view key) {
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    if (line.starts_with(key)) {
      return leading_number(line.substr(key.size()));
    }
    text.remove_prefix(std::min(line.size() + 1, text.size()));
  }
  return std::nullopt;
}

std::optional<std::size_t> kibibytes_after(std::string_view text, std::string_view key) {
  const std::optional<std::size_t> value = number_after(text, key);
  return value ? std::optional(*value * 1024) : std::nullopt;
}

std::vector<int> parse_list(std::string_view text) {
  std::vector<int> numbers;
  while (!text.empty()) {
    const std::string_view range = text.substr(0, text.find(','));
    const auto first = leading_number(range);
    const std::size_t dash = range.find('-');
    const auto last = dash == std::string_view::npos ? first : leading_number(range.substr(dash + 1));
    if (first && last) {
      for (std::size_t number = *first; number <= *last; ++number) {
        numbers.push_back(static_cast<int>(number));
      }
    }
    text.remove_prefix(std::min(range.size() + 1, text.size()));
  }
  return numbers;
}

}  // namespace ballast
