// TCP as the hub and its clients use it: small messages, and an end that is noticed.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "kernels/runtime/descriptor.h"
#include "kernels/runtime/not_in_children.h"
#include "zero/comm/message.h"

namespace ballast {

struct Endpoint {
  std::string host;  // a name or a number
  std::uint16_t port = 0;
};

std::string text(const Endpoint& endpoint);  // "host:port"

// A port that is taken or an address that is not this machine's: B3303. Port 0: any that is free.
Descriptor listen_at(const Endpoint& endpoint);
Endpoint local_endpoint(const Descriptor& socket);  // in numbers
bool is_loopback(const std::string& host);

// One attempt; empty if nobody listens there. A name that nobody knows: B3303.
Descriptor try_connect(const Endpoint& endpoint, std::chrono::milliseconds timeout);

// One end of a connection. Sending and receiving may be two threads' work.
class Connection {
 public:
  explicit Connection(Descriptor socket);

  // Without waiting for long: false if the other end is gone or has not read for seconds.
  bool send(const Message& message);

  // Takes what has arrived, waiting for at most `timeout`; false when the other end is gone.
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
