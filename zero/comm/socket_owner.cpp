#include "zero/comm/socket_owner.h"

#include <fmt/format.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <system_error>

#include "kernels/runtime/system_files.h"

namespace ballast {
namespace {

// One end of a connection.
struct End {
  std::array<std::uint32_t, 4> words{};  // of the address, in the order of the network; an address of IPv4 has one
  std::uint16_t port = 0;                // in the order of the network
  bool has_four_words = false;           // IPv6
  bool is_loopback = false;
};

// `get_name` is getsockname() or getpeername().
std::optional<End> end_of(const Descriptor& socket, int (*get_name)(int, sockaddr*, socklen_t*)) {
  sockaddr_in6 six{};  // is larger than an address of IPv4
  socklen_t bytes = sizeof six;
  if (get_name(socket.get(), reinterpret_cast<sockaddr*>(&six), &bytes) != 0) return std::nullopt;
  End end;
  if (six.sin6_family == AF_INET6) {
    std::memcpy(end.words.data(), &six.sin6_addr, sizeof six.sin6_addr);
    end.port = six.sin6_port;
    end.has_four_words = true;
    end.is_loopback = IN6_IS_ADDR_LOOPBACK(&six.sin6_addr);
    return end;
  }
  sockaddr_in four{};
  std::memcpy(&four, &six, sizeof four);
  end.words[0] = four.sin_addr.s_addr;
  end.port = four.sin_port;
  end.is_loopback = ntohl(four.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  return end;
}

// As the kernel prints it: the words of the address as numbers of this machine, and the port.
std::string printed(const End& end) {
  std::string text;
  for (std::size_t i = 0; i < (end.has_four_words ? end.words.size() : 1); ++i) {
    text += fmt::format("{:08X}", end.words[i]);
  }
  return text + fmt::format(":{:04X}", ntohs(end.port));
}

// Asks the kernel for one socket. None if it does not know the socket, or does not answer such questions. The table has all
// sockets, and takes the kernel a hundred times as long.
std::optional<uid_t> asked_owner(const End& local, const End& remote) {
  struct {
    nlmsghdr head{};
    inet_diag_req_v2 request{};
  } question;
  question.head.nlmsg_len = sizeof question;
  question.head.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.head.nlmsg_flags = NLM_F_REQUEST;
  question.request.sdiag_family = local.has_four_words ? AF_INET6 : AF_INET;
  question.request.sdiag_protocol = IPPROTO_TCP;
  question.request.idiag_states = ~0U;
  question.request.id.idiag_sport = local.port;
  question.request.id.idiag_dport = remote.port;
  std::ranges::copy(local.words, question.request.id.idiag_src);
  std::ranges::copy(remote.words, question.request.id.idiag_dst);
  std::ranges::fill(question.request.id.idiag_cookie, INET_DIAG_NOCOOKIE);
  const Descriptor kernel(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  if (::send(kernel.get(), &question, sizeof question, 0) != sizeof question) return std::nullopt;
  struct {
    nlmsghdr head{};
    inet_diag_msg found{};
    std::array<std::byte, 1024> details{};
  } answer;
  const ssize_t bytes = ::recv(kernel.get(), &answer, sizeof answer, 0);
  const bool is_found = bytes >= static_cast<ssize_t>(offsetof(decltype(answer), details)) &&
                        answer.head.nlmsg_type == SOCK_DIAG_BY_FAMILY && answer.found.idiag_state == TCP_ESTABLISHED;
  return is_found ? std::optional<uid_t>(answer.found.idiag_uid) : std::nullopt;
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
  if (!mine->is_loopback && mine->words != theirs->words) return OtherEnd::accepted;
  auto owner = asked_owner(*theirs, *mine);
  if (!owner) {
    const auto table = read_text(mine->has_four_words ? "/proc/net/tcp6" : "/proc/net/tcp");
    if (!table) return OtherEnd::accepted;
    owner = owner_in(*table, printed(*theirs), printed(*mine));
  }
  if (!owner) return OtherEnd::gone;
  return *owner == ::geteuid() ? OtherEnd::accepted : OtherEnd::foreign;
}

}  // namespace ballast
