#include "zero/comm/message.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <sstream>
#include <system_error>

#include "kernels/runtime/system_files.h"

namespace ballast {
namespace {

std::string name_of_host() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return host[0] == '\0' ? "?" : host.data();
}

constexpr std::uint32_t magic = 0x37544C42;  // "BLT7", the number being the protocol's version

struct WireHeader {
  std::uint32_t magic;
  std::uint32_t kind;
  std::uint32_t key_bytes;
  std::uint32_t value_bytes;
};

}  // namespace

Member this_process(std::size_t rank, std::size_t size, std::size_t ranks_per_host) {
  return {rank, size, name_of_host(), ::getpid(), this_machine(), ranks_per_host};
}

// Within a PID namespace, process numbers have the same meaning. Where /proc is hidden, hosts differ by name.
std::string this_machine() {
  std::error_code unknown;
  const auto boot = read_text("/proc/sys/kernel/random/boot_id").value_or(name_of_host());
  return boot.substr(0, boot.find('\n')) + std::filesystem::read_symlink("/proc/self/ns/pid", unknown).string();
}

std::string text(const Member& member) {
  return fmt::format("rank {} ({}, pid {})", member.rank, member.host, member.pid);
}

// Processes of one machine have no network between them that could fail instead.
std::string died(const Member& member, const std::string& observer) {
  const bool is_elsewhere = member.machine != observer;
  return text(member) + (is_elsewhere ? " is gone: connection lost: its process ended, or the network to it failed"
                                      : " died: connection lost: its process ended");
}

std::string left(const Member& member, const std::string& words) {
  return fmt::format("{} left: {}", text(member), words);
}

std::string to_line(const Member& member, const Member& before) {
  return fmt::format("{} {} {} {} {} {}", member.rank, member.size, member.pid,
                     member.host == before.host ? "=" : member.host,
                     member.machine == before.machine ? "=" : member.machine, member.ranks_per_host);
}

Member member_from(const std::string& line, const Member& before) {
  Member member;
  std::istringstream words(line);
  words >> member.rank >> member.size >> member.pid >> member.host >> member.machine >> member.ranks_per_host;
  if (words.fail() || member.pid <= 0) fail_malformed();
  if (member.host == "=") member.host = before.host;
  if (member.machine == "=") member.machine = before.machine;
  return member;
}

std::string to_words(const std::vector<std::size_t>& ranks) { return fmt::format("{}", fmt::join(ranks, " ")); }

std::vector<std::size_t> ranks_from(const std::string& words) {
  std::istringstream stream(words);
  return {std::istream_iterator<std::size_t>(stream), std::istream_iterator<std::size_t>()};
}

std::string to_line(const Share& share) { return fmt::format("{} {} {}", share.rank, share.size, share.value); }

std::optional<Share> share_from(const std::string& line) {
  Share share;
  std::istringstream stream(line);
  if (!(stream >> share.rank >> share.size) || stream.get() != ' ' || share.rank >= share.size) return std::nullopt;
  share.value = line.substr(static_cast<std::size_t>(stream.tellg()));
  return share;
}

std::string join(const std::vector<std::string>& values) {
  std::string joined;
  for (const std::string& value : values) {
    joined += fmt::format("{}:{}", value.size(), value);
  }
  return joined;
}

std::vector<std::string> split(const std::string& joined) {
  std::vector<std::string> values;
  for (std::size_t begin = 0; begin < joined.size();) {
    const std::size_t colon = joined.find(':', begin);
    if (colon == std::string::npos) fail_malformed();
    const auto bytes = whole_number<std::size_t>(std::string_view(joined).substr(begin, colon - begin));
    if (!bytes || *bytes > joined.size() - colon - 1) fail_malformed();
    values.push_back(joined.substr(colon + 1, *bytes));
    begin = colon + 1 + *bytes;
  }
  return values;
}

void fail_malformed() { fail(Code::no_meeting, {.what = "cannot read a message of another process: it is malformed"}); }

std::string to_wire(const Message& message) {
  const WireHeader header{magic, static_cast<std::uint32_t>(message.kind),
                          static_cast<std::uint32_t>(message.key.size()),
                          static_cast<std::uint32_t>(message.value.size())};
  std::string bytes(sizeof header, '\0');
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes + message.key + message.value;
}

std::optional<Message> Inbox::next() {
  WireHeader header{};
  if (bytes_.size() < sizeof header) return std::nullopt;
  std::memcpy(&header, bytes_.data(), sizeof header);
  require(
      header.magic == magic && header.kind <= static_cast<std::uint32_t>(Message::Kind::goodbye) &&
          header.key_bytes <= most_ && header.value_bytes <= most_,
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
