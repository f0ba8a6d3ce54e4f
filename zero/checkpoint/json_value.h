// Values of JSON files that may be damaged or forged: what is not as it should be is B3202, with the file and the place in it.
#pragma once

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace ballast {

inline constexpr std::uint64_t most_bytes = std::uint64_t{1}
                                            << 56;  // of a file: sums and products of such numbers do not overflow
inline constexpr std::size_t most_dimensions = 64;

[[noreturn]] inline void fail_malformed(const std::filesystem::path& file, const std::string& why,
                                        const std::string& needed = {}) {
  fail(Code::bad_record,
       {.what = "cannot use a file: " + why,
        .where = file.string(),
        .needed = needed,
        .remedy = "It is damaged, or made by another program. Get it again from its source, or use an earlier one."});
}

// Returns the text that Python's json.dumps(content, sort_keys=True, separators=(",", ":")) writes. Throws B1001 for text in another
// encoding than UTF-8.
inline std::string json_text(const nlohmann::json& content, int indent = -1) {
  try {
    return content.dump(indent, ' ', true);
  } catch (const nlohmann::json::exception& error) {
    fail(Code::bad_argument, {.what = fmt::format("cannot write a file: a name is not UTF-8 ({})", error.what()),
                              .needed = "names of units and tensors in UTF-8"});
  }
}

// The words of a parser, which may repeat bytes that are no text.
inline std::string words_of(const nlohmann::json::exception& error) {
  std::string words = error.what();
  std::ranges::replace_if(
      words, [](char each) { return each < ' '; }, '?');
  return words;
}

// A value in a JSON file. Its methods return it in a type of C++, and name its place in errors.
class JsonValue {
 public:
  JsonValue(const nlohmann::json& value, const std::filesystem::path& file, std::string at = {})
      : value_(value), file_(file), at_(std::move(at)) {}

  JsonValue operator[](const std::string& key) const {
    require_kind(value_.is_object(), "an object");
    const auto found = value_.find(key);
    if (found == value_.end()) fail_malformed(file_, below(key) + " is missing");
    return {*found, file_, below(key)};
  }

  bool has(const std::string& key) const { return value_.is_object() && value_.contains(key); }

  void each_item(const std::function<void(const std::string& key, const JsonValue& value)>& visit) const {
    require_kind(value_.is_object(), "an object");
    for (const auto& [key, value] : value_.items())
      visit(key, {value, file_, below(key)});
  }

  std::vector<JsonValue> elements(std::optional<std::size_t> count = {}) const {
    require_kind(value_.is_array() && value_.size() == count.value_or(value_.size()),
                 count ? fmt::format("a list of {}", *count) : "a list");
    std::vector<JsonValue> found;
    for (const nlohmann::json& each : value_)
      found.push_back({each, file_, fmt::format("{}[{}]", at_, found.size())});
    return found;
  }

  std::size_t count(std::uint64_t most = std::uint64_t{INT64_MAX}) const {
    require_kind(value_.is_number_unsigned() && value_.get<std::uint64_t>() <= most,
                 most == INT64_MAX ? "a whole number from 0 on" : fmt::format("a whole number from 0 to {}", most));
    return value_.get<std::uint64_t>();
  }

  // The sizes of a tensor, whose product does not overflow.
  std::vector<std::size_t> shape() const {
    std::vector<std::size_t> sizes;
    std::uint64_t product = 1;
    for (const JsonValue& each : elements()) {
      sizes.push_back(each.count(most_bytes));
      const bool fits = product == 0 || sizes.back() <= most_bytes / product;
      require_kind(fits && sizes.size() <= most_dimensions, "the shape of a tensor that fits into files");
      product *= sizes.back();
    }
    return sizes;
  }

  std::string text() const {
    require_kind(value_.is_string(), "text");
    return value_.get<std::string>();
  }

  bool flag() const {
    require_kind(value_.is_boolean(), "true or false");
    return value_.get<bool>();
  }

  void require_kind(bool is, const std::string& needed) const {
    if (!is) refuse(needed);
  }

  [[noreturn]] void refuse(const std::string& needed) const {
    std::string shown = value_.is_object() ? "an object" : value_.is_array() ? "a list" : value_.dump(-1, ' ', true);
    if (shown.size() > 60) shown = shown.substr(0, 57) + "...";
    fail_malformed(file_, fmt::format("{} is {}", at_.empty() ? "its content" : at_, shown), needed);
  }

 private:
  std::string below(const std::string& key) const { return at_.empty() ? key : at_ + "." + key; }

  const nlohmann::json& value_;
  const std::filesystem::path& file_;
  std::string at_;
};

}  // namespace ballast
