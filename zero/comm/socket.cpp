#include "zero/comm/socket.h"

#include <ballast/error.h>

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <linux/sockios.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <system_error>

#include "kernels/runtime/system_files.h"
#include "zero/comm/deadline.h"

namespace ballast {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto time_to_read = std::chrono::seconds(5);
constexpr auto time_of_attempt = std::chrono::seconds(5);  // time to connect to one address
constexpr std::size_t no_limit = std::numeric_limits<std::size_t>::max();
constexpr int silence_ms = 30'000;  // a machine that is silent for longer counts as gone
// The hub's messages to a rank that is stopped are far fewer.
constexpr std::size_t max_unsent_bytes = std::size_t{64} << 20;

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

std::string reason(int error) { return std::generic_category().message(error); }

struct Found {
  Addresses addresses{nullptr, ::freeaddrinfo};
  std::string failure{};  // the reason, if there are no addresses
};

Found look_up(const Endpoint& endpoint, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int result = ::getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &found);
  if (result == EAI_SYSTEM && is_descriptor_limit(errno)) fail_limit("cannot look up " + endpoint.host, errno);
  if (result == 0) return {.addresses = {found, ::freeaddrinfo}};
  return {.failure = result == EAI_SYSTEM ? reason(errno) : ::gai_strerror(result)};
}

// The name of rank 0 may appear after its process: a cluster may announce it when the machine is ready.
Addresses await_addresses(const Endpoint& endpoint, int flags, std::chrono::milliseconds patience) {
  const auto end = Clock::now() + patience;
  GrowingPause pause;
  while (true) {
    Found found = look_up(endpoint, flags);
    if (found.addresses) return std::move(found.addresses);
    require(Clock::now() < end, Code::no_meeting, [&] {
      return Problem{.what = fmt::format("cannot look up the address {}", endpoint.host),
                     .available = found.failure,
                     .remedy = "Correct MASTER_ADDR."};
    });
    pause.wait(end);
  }
}

bool leads_to_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
  }
  const auto* const four = reinterpret_cast<const sockaddr_in*>(address);
  return ntohl(four->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

bool names_only_loopback(const std::string& host) {
  const Found found = look_up({host, 0}, 0);
  const addrinfo* address = found.addresses.get();
  while (address != nullptr && leads_to_loopback(address->ai_addr)) {
    address = address->ai_next;
  }
  return found.addresses != nullptr && address == nullptr;
}

// Returns an empty descriptor if the machine lacks this kind of address.
Descriptor open_socket(const addrinfo& address, int flags = 0) {
  Descriptor socket(::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC | flags, address.ai_protocol));
  if (!socket && is_descriptor_limit(errno)) fail_limit("cannot make a socket", errno);
  return socket;
}

void set_option(const Descriptor& socket, int level, int option, int value) {
  ::setsockopt(socket.get(), level, option, &value,
               sizeof value);  // the options are refinements, so a refused one is no error
}

bool wait_for(const Descriptor& socket, short events, std::chrono::milliseconds timeout) {
  pollfd waiting{socket.get(), events, 0};
  return ::poll(&waiting, 1, static_cast<int>(timeout.count())) > 0;
}

// Returns the number of bytes that the system took, which may be 0; -1 if the other end is gone.
ssize_t send_now(const Descriptor& socket, std::string_view bytes) {
  std::size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t result = ::send(socket.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (result < 0 && errno != EINTR) return -1;
    sent += static_cast<std::size_t>(std::max<ssize_t>(result, 0));
  }
  return static_cast<ssize_t>(sent);
}

// `get_name` is getsockname() or getpeername(), which fails for a connection that is lost.
std::optional<Endpoint> endpoint_of(const Descriptor& socket, int (*get_name)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t bytes = sizeof address;
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  const bool known = get_name(socket.get(), reinterpret_cast<sockaddr*>(&address), &bytes) == 0 &&
                     ::getnameinfo(reinterpret_cast<sockaddr*>(&address), bytes, host.data(), host.size(), port.data(),
                                   port.size(), NI_NUMERICHOST | NI_NUMERICSERV) == 0;
  if (!known) return std::nullopt;
  return Endpoint{host.data(), static_cast<std::uint16_t>(std::stoi(port.data()))};
}

Endpoint require_endpoint(const Descriptor& socket, int (*get_name)(int, sockaddr*, socklen_t*)) {
  const auto endpoint = endpoint_of(socket, get_name);
  require(endpoint.has_value(), Code::no_meeting,
          [] { return Problem{.what = "cannot read the address of a socket"}; });
  return *endpoint;
}

// If no process listens at a port, the system may choose that port for the caller, which then connects to itself.
bool is_self(const Descriptor& socket) {
  const auto mine = endpoint_of(socket, ::getsockname);
  const auto theirs = endpoint_of(socket, ::getpeername);
  return mine && theirs && mine->host == theirs->host && mine->port == theirs->port;
}

// Connects a socket that does not wait by itself. Returns 0, or the error. A signal does not end the attempt.
int connect_within(const Descriptor& socket, const addrinfo& address, std::chrono::milliseconds timeout) {
  const auto end = Clock::now() + timeout;
  if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS && errno != EINTR) return errno;
  while (!wait_for(socket, POLLOUT, std::chrono::ceil<std::chrono::milliseconds>(left_until(end)))) {
    if (Clock::now() >= end) return ETIMEDOUT;
  }
  int error = 0;
  socklen_t bytes = sizeof error;
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 ? error : errno;
}

// Returns 0, or the error.
int try_listen(const addrinfo& address, Descriptor& socket) {
  socket = open_socket(address, SOCK_NONBLOCK);
  if (!socket) return errno;
  set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);  // so that a job can use the port of one that has just ended
  // So that the address of all of IPv6 leaves the port of IPv4 to another socket.
  if (address.ai_family == AF_INET6) set_option(socket, IPPROTO_IPV6, IPV6_V6ONLY, 1);
  const bool is_listening =
      ::bind(socket.get(), address.ai_addr, address.ai_addrlen) == 0 && ::listen(socket.get(), SOMAXCONN) == 0;
  return is_listening ? 0 : errno;
}

[[noreturn]] void refuse_to_listen(const Endpoint& endpoint, int error) {
  if (error == EADDRINUSE) {
    fail(Code::no_meeting,
         {.what = fmt::format("cannot listen at {}: the port is in use", text(endpoint)),
          .where = "rank 0, the rendezvous",
          .remedy = "Another job may run there: give each a MASTER_PORT (or BALLAST_PORT) of its own."});
  }
  fail(Code::no_meeting, {.what = fmt::format("cannot listen at {}", text(endpoint)),
                          .available = reason(error),
                          .remedy = "MASTER_ADDR must be an address of the machine that rank 0 runs on."});
}

bool is_same(const addrinfo& one, const addrinfo& other) {
  return one.ai_addrlen == other.ai_addrlen && std::memcmp(one.ai_addr, other.ai_addr, one.ai_addrlen) == 0;
}

bool is_repeated(const addrinfo& address, const addrinfo* first) {
  while (first != &address && !is_same(*first, address)) {
    first = first->ai_next;
  }
  return first != &address;
}

// The name may have addresses of a kind that this machine lacks. A port in use is no such reason.
bool is_lacking(int error) { return error == EADDRNOTAVAIL || error == EAFNOSUPPORT; }

using Sockets = std::vector<Descriptor>;

// Listens at addresses of the name that this machine has, until there are `most` sockets. Returns 0, or why it lacks one. Another
// error than that of an address that the machine lacks ends it.
int add_listeners(const Endpoint& endpoint, std::chrono::milliseconds patience, std::size_t most, Sockets& sockets) {
  const Addresses addresses = await_addresses(endpoint, AI_PASSIVE, patience);
  int lacking = 0;
  for (const addrinfo* address = addresses.get(); address != nullptr && sockets.size() < most;
       address = address->ai_next) {
    if (is_repeated(*address, addresses.get())) continue;
    Descriptor socket;
    const int error = try_listen(*address, socket);
    if (error == 0) sockets.push_back(std::move(socket));
    if (error != 0) lacking = error;
    if (error != 0 && !is_lacking(error)) return error;
  }
  return lacking;
}

const std::vector<std::string> everywhere{"0.0.0.0", "::"};

// The same for several names.
int add_listeners(const std::vector<std::string>& hosts, std::uint16_t port, std::chrono::milliseconds patience,
                  Sockets& sockets) {
  int error = 0;
  for (const std::string& host : hosts) {
    if (const int failed = add_listeners({host, port}, patience, no_limit, sockets)) error = failed;
    if (error != 0 && !is_lacking(error)) break;
  }
  return error;
}

std::uint16_t free_port() {
  Sockets sockets;
  const int error = add_listeners(everywhere, 0, {}, sockets);
  if (sockets.empty()) refuse_to_listen({everywhere.front(), 0}, error);
  return local_endpoint(sockets.front()).port;
}

// Listens at all addresses of the names with one port. Port 0 is any that is free at all of them.
Sockets listen_with_one_port(const std::vector<std::string>& hosts, std::uint16_t port,
                             std::chrono::milliseconds patience = {}) {
  constexpr int most_attempts = 16;  // another process may take a port that was free
  for (int attempt = 1;; ++attempt) {
    Sockets sockets;
    const Endpoint chosen{hosts.front(), port == 0 ? free_port() : port};
    const int error = add_listeners(hosts, chosen.port, patience, sockets);
    const bool has_failed = sockets.empty() || (error != 0 && !is_lacking(error));
    if (!has_failed) return sockets;
    if (port != 0 || error != EADDRINUSE || attempt == most_attempts) refuse_to_listen(chosen, error);
  }
}

// One end of a connection.
struct End {
  // Words of the address, in the order of the network; an address of IPv4 has one.
  std::array<std::uint32_t, 4> words{};
  std::uint16_t port = 0;       // port, in the order of the network
  bool has_four_words = false;  // IPv6
  bool is_loopback = false;
};

// `get_name` is getsockname() or getpeername().
std::optional<End> end_of(const Descriptor& socket, int (*get_name)(int, sockaddr*, socklen_t*)) {
  sockaddr_in6 six{};  // is larger than an address of IPv4
  socklen_t bytes = sizeof six;
  if (get_name(socket.get(), reinterpret_cast<sockaddr*>(&six), &bytes) != 0) return std::nullopt;
  End end{.port = six.sin6_port,  // the place is the same in both versions
          .has_four_words = six.sin6_family == AF_INET6,
          .is_loopback = leads_to_loopback(reinterpret_cast<const sockaddr*>(&six))};
  if (end.has_four_words) {
    std::memcpy(end.words.data(), &six.sin6_addr, sizeof six.sin6_addr);
  } else {
    std::memcpy(end.words.data(), &reinterpret_cast<const sockaddr_in*>(&six)->sin_addr, sizeof(in_addr));
  }
  return end;
}

// The kernel prints it so: the words of the address as numbers of this machine, and the port.
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

std::string text(const Endpoint& endpoint) { return fmt::format("{}:{}", endpoint.host, endpoint.port); }

Descriptor listen_at(const Endpoint& endpoint, std::chrono::milliseconds patience) {
  Sockets sockets;
  const int error = add_listeners(endpoint, patience, 1, sockets);
  if (sockets.empty()) refuse_to_listen(endpoint, error);
  return std::move(sockets.front());
}

std::vector<Descriptor> listen_at_all(const Endpoint& endpoint, std::chrono::milliseconds patience) {
  Sockets sockets = listen_with_one_port({endpoint.host}, endpoint.port, patience);
  const auto outward =
      std::ranges::find_if(sockets, [](const auto& socket) { return !is_loopback(local_endpoint(socket).host); });
  if (outward != sockets.end()) std::iter_swap(sockets.begin(), outward);
  return sockets;
}

std::vector<Descriptor> listen_everywhere(std::uint16_t port) { return listen_with_one_port(everywhere, port); }

Endpoint local_endpoint(const Descriptor& socket) { return require_endpoint(socket, ::getsockname); }

Endpoint remote_endpoint(const Descriptor& socket) { return require_endpoint(socket, ::getpeername); }

std::string other_end(const Descriptor& socket) {
  const auto endpoint = endpoint_of(socket, ::getpeername);
  return endpoint ? text(*endpoint) : "?";
}

bool is_loopback(const std::string& host) { return host == "localhost" || host == "::1" || host.starts_with("127."); }

bool is_own_name(const std::string& host) { return !is_loopback(host) && names_only_loopback(host); }

Attempt try_connect(const Endpoint& endpoint, std::chrono::milliseconds timeout) {
  const auto end = Clock::now() + timeout;
  const Found found = look_up(endpoint, 0);
  if (!found.addresses) return {.failure = fmt::format("cannot look up {}: {}", endpoint.host, found.failure)};
  Attempt attempt;
  for (const addrinfo* address = found.addresses.get(); address != nullptr; address = address->ai_next) {
    Descriptor socket = open_socket(*address, SOCK_NONBLOCK);
    const auto time = std::min<Clock::duration>(left_until(end), time_of_attempt);
    int error = socket ? connect_within(socket, *address, std::chrono::ceil<std::chrono::milliseconds>(time)) : errno;
    if (error == 0 && is_self(socket)) error = ECONNREFUSED;
    if (error == 0) {
      ::fcntl(socket.get(), F_SETFL, ::fcntl(socket.get(), F_GETFL) & ~O_NONBLOCK);
      return {.socket = std::move(socket)};
    }
    attempt.failure = reason(error);
    attempt.is_silent = error == ETIMEDOUT;
  }
  return attempt;
}

Connection::Connection(Descriptor socket, std::size_t max_message) : socket_(std::move(socket)), inbox_(max_message) {
  set_option(socket_, IPPROTO_TCP, TCP_NODELAY, 1);
  // A machine that vanishes closes no connection. TCP probes it after 15 seconds of silence, and closes after half a
  // minute, unless sent bytes are unacknowledged: see limit_silence().
  set_option(socket_, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket_, IPPROTO_TCP, TCP_KEEPIDLE, 15);
  set_option(socket_, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(socket_, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

void Connection::limit_silence() { set_option(socket_, IPPROTO_TCP, TCP_USER_TIMEOUT, silence_ms); }

void Connection::send(const Message& message) {
  const auto end = Clock::now() + time_to_read;
  post(message);
  while (has_unsent() && Clock::now() < end) {
    wait_for(socket_, POLLOUT, std::chrono::milliseconds(100));
    flush();
  }
}

void Connection::post(const Message& message) {
  if (is_stuck()) return;
  unsent_.push_back(to_wire(message));
  unsent_bytes_ += unsent_.back().size();
  flush();
}

void Connection::flush() {
  while (!unsent_.empty()) {
    std::string& first = unsent_.front();
    const ssize_t taken = send_now(socket_, first);
    const std::size_t sent = taken < 0 ? first.size() : static_cast<std::size_t>(taken);
    unsent_bytes_ -= sent;
    if (sent < first.size()) return static_cast<void>(first.erase(0, sent));
    unsent_.pop_front();
  }
}

bool Connection::has_arrived() const {
  int unacknowledged = 0;
  return !has_unsent() && ::ioctl(socket_.get(), SIOCOUTQ, &unacknowledged) == 0 && unacknowledged == 0;
}

bool Connection::is_stuck() const { return unsent_bytes_ > max_unsent_bytes; }

bool Connection::receive(std::chrono::milliseconds timeout) {
  if (!wait_for(socket_, POLLIN, timeout)) return true;
  std::array<char, 4096> bytes{};
  const ssize_t result = ::recv(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (result > 0) inbox_.add({bytes.data(), static_cast<std::size_t>(result)});
  return result > 0 || (result < 0 && (errno == EINTR || errno == EAGAIN));
}

void Connection::shut_down() { ::shutdown(socket_.get(), SHUT_RDWR); }

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
  return whole_number<uid_t>(next_word(line));
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
