// TCP between the hub and its clients: small messages, and prompt notice of a lost connection.
#pragma once

#include <ballast/comm.h>

#include <chrono>
#include <optional>
#include <string>

#include "kernels/runtime/descriptor.h"
#include "kernels/runtime/not_in_children.h"
#include "zero/comm/message.h"

namespace ballast {

std::string text(const Endpoint& endpoint);  // "host:port"

// Throws B3303 for a port in use or an address of another machine. Port 0 means any free port.
Descriptor listen_at(const Endpoint& endpoint);
Endpoint local_endpoint(const Descriptor& socket);  // numeric
bool is_loopback(const std::string& host);

// Makes one attempt. Returns an empty descriptor if no process listens there; throws B3303 for an unknown host name.
Descriptor try_connect(const Endpoint& endpoint, std::chrono::milliseconds timeout);

// One end of a connection. One thread may send while another receives.
class Connection {
 public:
  explicit Connection(Descriptor socket);

  // Returns false if the other end is gone, or has not read for five seconds.
  bool send(const Message& message);

  // Reads what has arrived, and waits up to `timeout` for it. Returns false when the other end is gone.
  bool receive(std::chrono::milliseconds timeout);
  std::optional<Message> next() { return inbox_.next(); }

  void shut_down();  // ends a receive() of another thread
  const Descriptor& socket() const { return socket_; }

 private:
  Descriptor socket_;
  NotInChildren parents_{socket_.get()};
  Inbox inbox_;
};

}  // namespace ballast
