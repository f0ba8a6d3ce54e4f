// TCP between processes of a job: small messages, prompt notice of a lost connection, and the user at the other end.
#pragma once

#include <ballast/comm.h>

#include <sys/types.h>

#include <chrono>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/runtime/system_resources.h"
#include "zero/comm/message.h"

namespace ballast {

std::string text(const Endpoint& endpoint);  // "host:port"

// Throws B3303 for a port in use, an address of another machine, or a name that has no address for so long. Port 0 means any
// free port. accept() of the socket does not wait.
Descriptor listen_at(const Endpoint& endpoint, std::chrono::milliseconds patience = {});
// The same at each address of the name that this machine has, with a socket each: other machines may resolve the name to any of
// them. If some are not loopback, the first socket is at such an address.
std::vector<Descriptor> listen_at_all(const Endpoint& endpoint, std::chrono::milliseconds patience = {});
// Listens at all addresses of this machine, with one port.
std::vector<Descriptor> listen_everywhere(std::uint16_t port);
Endpoint local_endpoint(const Descriptor& socket);   // numeric
Endpoint remote_endpoint(const Descriptor& socket);  // the same, of a connection's other end
std::string other_end(const Descriptor& socket);  // the other end of a connection: "10.0.0.7:4242"; "?" if it is lost
bool is_loopback(const std::string& host);

// Whether this is a name, and leads to loopback only: it is this machine's own name, as many systems resolve it, and other
// machines resolve it to something else.
bool is_own_name(const std::string& host);

struct Attempt {
  Descriptor socket{};
  std::string failure{};   // the reason, if there is no socket
  bool is_silent = false;  // nothing has answered in time
};

// Makes one attempt at each address of the name, of at most five seconds.
Attempt try_connect(const Endpoint& endpoint, std::chrono::milliseconds timeout);

// One end of a connection. One thread may send while another receives.
class Connection {
 public:
  explicit Connection(Descriptor socket, std::size_t max_message = max_message_bytes);

  // Waits up to five seconds for room at the other end, and keeps the rest for the next call.
  void send(const Message& message);

  // Sends without waiting. Keeps bytes for which the other end has no room, until flush(). If the other end is gone, does
  // nothing: receive() says so, after what it has sent.
  void post(const Message& message);
  void flush();
  bool has_unsent() const { return !unsent_.empty(); }
  bool has_arrived() const;  // the other end's system has acknowledged all that was sent
  bool is_stuck() const;     // the other end has let too many bytes lie unread

  // Reads what has arrived, and waits up to `timeout` for it. Returns false when the other end is gone.
  bool receive(std::chrono::milliseconds timeout);
  std::optional<Message> next() { return inbox_.next(); }

  void allow(std::size_t max_message) { inbox_.allow(max_message); }

  // Ends the connection if the other machine acknowledges no byte for half a minute, or has no room for more because its
  // process reads none. TCP sends no probes while bytes are unacknowledged, and repeats those for a quarter of an hour.
  void limit_silence();
  void shut_down();  // ends a receive() of another thread
  Descriptor release() && { return std::move(socket_); }
  const Descriptor& socket() const { return socket_; }

 private:
  Descriptor socket_;
  NotInChildren parents_{socket_.get()};
  Inbox inbox_;
  std::deque<std::string> unsent_;  // messages, the first one without what the system has taken
  std::size_t unsent_bytes_ = 0;
};

// The user of the process at the other end of a connection within this machine, as the kernel knows it.
enum class OtherEnd {
  accepted,  // it is of this process's user, or on another machine, or this machine has no table of its sockets
  foreign,   // it is of another user of this machine
  gone,      // its process has closed it
};

OtherEnd other_end_of(const Descriptor& socket);

// The user of the socket `local` that is connected with `remote`. The table is the text of /proc/net/tcp, and the addresses have
// its form. None for a socket that its process has closed, whose user the kernel has forgotten.
std::optional<uid_t> owner_in(std::string_view table, std::string_view local, std::string_view remote);

}  // namespace ballast
