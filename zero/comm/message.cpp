#include "zero/comm/message.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <iterator>
#include <sstream>

namespace ballast {
namespace {

constexpr std::uint32_t magic = 0x32544C42;  // "BLT2", the number being the protocol's version
constexpr std::uint32_t max_bytes = 1 << 20;

struct Header {
  std::uint32_t magic;
  std::uint32_t kind;
  std::uint32_t key_bytes;
  std::uint32_t value_bytes;
};

}  // namespace

std::string to_words(const std::vector<std::size_t>& ranks) { return fmt::format("{}", fmt::join(ranks, " ")); }

std::vector<std::size_t> ranks_from(const std::string& words) {
  std::istringstream stream(words);
  return {std::istream_iterator<std::size_t>(stream), std::istream_iterator<std::size_t>()};
}

std::string to_wire(const Message& message) {
  const Header header{magic, static_cast<std::uint32_t>(message.kind), static_cast<std::uint32_t>(message.key.size()),
                      static_cast<std::uint32_t>(message.value.size())};
  std::string bytes(sizeof header, '\0');
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes + message.key + message.value;
}

std::optional<Message> Inbox::next() {
  Header header{};
  if (bytes_.size() < sizeof header) return std::nullopt;
  std::memcpy(&header, bytes_.data(), sizeof header);
  require(
      header.magic == magic && header.kind <= static_cast<std::uint32_t>(Message::Kind::goodbye) &&
          header.key_bytes <= max_bytes && header.value_bytes <= max_bytes,
      Code::no_meeting, [] {
        return Problem{
            .what = "cannot connect to rank 0: the process at its address is no Ballast job, or has another version"};
      });
  const std::size_t end = sizeof header + header.key_bytes + header.value_bytes;
  if (bytes_.size() < end) return std::nullopt;
  Message message{static_cast<Message::Kind>(header.kind), bytes_.substr(sizeof header, header.key_bytes),
                  bytes_.substr(sizeof header + header.key_bytes, header.value_bytes)};
  bytes_.erase(0, end);
  return message;
}

}  // namespace ballast
