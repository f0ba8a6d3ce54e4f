#include "zero/comm/socket_owner.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string>
#include <system_error>

#include "kernels/runtime/system_files.h"

namespace ballast {
namespace {

// An address as the kernel prints it: its words as numbers of this machine. The port follows after a colon.
struct Printed {
  std::string host{};
  std::string port{};
  bool is_loopback = false;
};

Printed print(const void* address, std::size_t words, in_port_t port, bool is_loopback) {
  Printed printed{.port = fmt::format(":{:04X}", ntohs(port)), .is_loopback = is_loopback};
  for (std::size_t i = 0; i < words; ++i) {
    std::uint32_t word = 0;
    std::memcpy(&word, static_cast<const std::byte*>(address) + i * sizeof word, sizeof word);
    printed.host += fmt::format("{:08X}", word);
  }
  return printed;
}

// `get_name` is getsockname() or getpeername().
std::optional<Printed> end_of(const Descriptor& socket, int (*get_name)(int, sockaddr*, socklen_t*)) {
  sockaddr_in6 six{};  // is larger than an address of IPv4
  socklen_t bytes = sizeof six;
  if (get_name(socket.get(), reinterpret_cast<sockaddr*>(&six), &bytes) != 0) return std::nullopt;
  if (six.sin6_family == AF_INET6) {
    return print(&six.sin6_addr, 4, six.sin6_port, IN6_IS_ADDR_LOOPBACK(&six.sin6_addr));
  }
  sockaddr_in four{};
  std::memcpy(&four, &six, sizeof four);
  return print(&four.sin_addr, 1, four.sin_port, ntohl(four.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET);
}

std::string_view next_word(std::string_view& line) {
  line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
  const std::string_view word = line.substr(0, line.find(' '));
  line.remove_prefix(word.size());
  return word;
}

}  // namespace

std::optional<uid_t> owner_in(std::string_view table, std::string_view local, std::string_view remote) {
  constexpr std::string_view connected = "01";
  constexpr int words_between = 3;  // the queues, two timers
  const std::string both = fmt::format(" {} {} ", local, remote);
  const std::size_t found = table.find(both);
  if (found == std::string_view::npos) return std::nullopt;
  std::string_view line = table.substr(found + both.size());
  line = line.substr(0, line.find('\n'));
  if (next_word(line) != connected) return std::nullopt;
  for (int i = 0; i < words_between; ++i) {
    next_word(line);
  }
  const std::string_view word = next_word(line);
  uid_t user = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), user);
  return error == std::errc() && end == word.data() + word.size() ? std::optional(user) : std::nullopt;
}

OtherEnd other_end_of(const Descriptor& socket) {
  const auto mine = end_of(socket, ::getsockname);
  const auto theirs = end_of(socket, ::getpeername);
  if (!mine || !theirs) return OtherEnd::gone;
  if (!mine->is_loopback && mine->host != theirs->host) return OtherEnd::accepted;
  const auto table = read_text(mine->host.size() == 8 ? "/proc/net/tcp" : "/proc/net/tcp6");
  if (!table) return OtherEnd::accepted;
  const auto owner = owner_in(*table, theirs->host + theirs->port, mine->host + mine->port);
  if (!owner) return OtherEnd::gone;
  return *owner == ::geteuid() ? OtherEnd::accepted : OtherEnd::foreign;
}

}  // namespace ballast
