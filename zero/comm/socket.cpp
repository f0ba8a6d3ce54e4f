#include "zero/comm/socket.h"

#include <ballast/error.h>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <memory>
#include <system_error>

#include "kernels/runtime/system_limits.h"

namespace ballast {
namespace {

constexpr auto time_to_read = std::chrono::seconds(5);
// The hub's messages to a rank that is stopped are far fewer.
constexpr std::size_t max_unsent_bytes = std::size_t{64} << 20;

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

std::string reason(int error) { return std::generic_category().message(error); }

Addresses addresses_of(const Endpoint& endpoint, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int result = ::getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &found);
  if (result == EAI_SYSTEM && is_descriptor_limit(errno)) fail_limit("cannot look up " + endpoint.host, errno);
  require(result == 0, Code::no_meeting, [&] {
    return Problem{.what = fmt::format("cannot look up the address {}", endpoint.host),
                   .available = ::gai_strerror(result),
                   .remedy = "Correct MASTER_ADDR."};
  });
  return {found, ::freeaddrinfo};
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

// If no process listens at a port, the system may choose that port for the caller, which then connects to itself.
bool is_self(const Descriptor& socket, const Endpoint& called) {
  const Endpoint mine = local_endpoint(socket);
  return mine.port == called.port && is_loopback(mine.host);
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

}  // namespace

std::string text(const Endpoint& endpoint) { return fmt::format("{}:{}", endpoint.host, endpoint.port); }

Descriptor listen_at(const Endpoint& endpoint) {
  const Addresses addresses = addresses_of(endpoint, AI_PASSIVE);
  Descriptor socket = open_socket(*addresses, SOCK_NONBLOCK);
  if (!socket) refuse_to_listen(endpoint, errno);
  set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);  // so that a job can use the port of one that has just ended
  if (::bind(socket.get(), addresses->ai_addr, addresses->ai_addrlen) != 0 || ::listen(socket.get(), SOMAXCONN) != 0) {
    refuse_to_listen(endpoint, errno);
  }
  return socket;
}

Endpoint local_endpoint(const Descriptor& socket) {
  const auto endpoint = endpoint_of(socket, ::getsockname);
  require(endpoint.has_value(), Code::no_meeting,
          [] { return Problem{.what = "cannot read the address of a socket"}; });
  return *endpoint;
}

std::string other_end(const Descriptor& socket) {
  const auto endpoint = endpoint_of(socket, ::getpeername);
  return endpoint ? text(*endpoint) : "?";
}

bool is_loopback(const std::string& host) { return host == "localhost" || host == "::1" || host.starts_with("127."); }

Descriptor try_connect(const Endpoint& endpoint, std::chrono::milliseconds timeout) {
  const Addresses addresses = addresses_of(endpoint, 0);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Descriptor socket = open_socket(*address);
    const timeval limit{timeout.count() / 1000, timeout.count() % 1000 * 1000};
    ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);  // applies to connect() too
    const bool connected = ::connect(socket.get(), address->ai_addr, address->ai_addrlen) == 0;
    if (connected && !is_self(socket, endpoint)) return socket;
  }
  return Descriptor();
}

Connection::Connection(Descriptor socket, std::size_t max_message) : socket_(std::move(socket)), inbox_(max_message) {
  set_option(socket_, IPPROTO_TCP, TCP_NODELAY, 1);
  // A machine that vanishes closes no connection. TCP probes it after 15 seconds of silence, and closes after half a
  // minute.
  set_option(socket_, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket_, IPPROTO_TCP, TCP_KEEPIDLE, 15);
  set_option(socket_, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(socket_, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

bool Connection::send(const Message& message) {
  std::string bytes = to_wire(message);
  const auto end = std::chrono::steady_clock::now() + time_to_read;
  while (!bytes.empty()) {
    const ssize_t sent = send_now(socket_, bytes);
    if (sent < 0) return false;
    bytes.erase(0, static_cast<std::size_t>(sent));
    if (bytes.empty()) break;
    if (std::chrono::steady_clock::now() >= end) return false;
    wait_for(socket_, POLLOUT, std::chrono::milliseconds(100));
  }
  return true;
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

bool Connection::is_stuck() const { return unsent_bytes_ > max_unsent_bytes; }

bool Connection::receive(std::chrono::milliseconds timeout) {
  if (!wait_for(socket_, POLLIN, timeout)) return true;
  std::array<char, 4096> bytes{};
  const ssize_t result = ::recv(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (result > 0) inbox_.add({bytes.data(), static_cast<std::size_t>(result)});
  return result > 0 || (result < 0 && (errno == EINTR || errno == EAGAIN));
}

void Connection::shut_down() { ::shutdown(socket_.get(), SHUT_RDWR); }

}  // namespace ballast
