// The door of listening sockets: admits processes that prove that they know the job's secret, and bounds what all others
// can use of this process. A connection that has not proved it may hold a few KiB for a few seconds. If there are too many
// of them, the oldest one ends, so that connections which are held open keep no rank out.
//
// In the first messages of a connection both ends prove that they know the secret, without sending it:
//
//   the listener: challenge    random bytes of the listener
//   the caller:   hello        a name, random bytes of the caller, its proof, and its words
//   the listener: welcome      its proof, and its words
//
// A proof covers the random bytes of both ends and the words, so a recorded one is of no use for another connection. What
// follows on the connection is neither proved nor encrypted.
#pragma once

#include <array>
#include <chrono>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/runtime/system_resources.h"
#include "zero/comm/message.h"
#include "zero/comm/socket.h"

namespace ballast {

inline constexpr std::size_t proof_bytes = 32;
inline constexpr std::size_t nonce_bytes = 32;

std::string random_bytes(std::size_t count);  // that no other process can predict
std::string random_secret();                  // 256 random bits, in letters and digits

// The secret of a job. Any thread may call.
class Secret {
 public:
  // An empty string is a secret that every process knows: it proves nothing.
  explicit Secret(std::string_view words = {});

  bool is_known_to_all() const { return is_known_to_all_; }
  std::string proof(std::string_view statement) const;  // proof_bytes of a keyed hash of the statement
  // Takes the same time for every wrong proof.
  bool proves(std::string_view proof, std::string_view statement) const;

 private:
  bool is_known_to_all_;
  std::array<unsigned char, 32> key_{};
};

// One end's part in it.
class Handshake {
 public:
  // The listener's.
  Message challenge() const { return {.kind = Message::Kind::challenge, .value = mine_}; }
  // Returns the hello with the caller's words as its value; none if its proof is wrong.
  std::optional<Message> read(const Message& hello, const Secret& secret);
  Message welcome(const std::string& words, const Secret& secret) const;  // read() comes first

  // The caller's.
  Message answer(const Message& challenge, Message hello, const Secret& secret);
  bool proves(const Message& welcome, const Secret& secret) const;  // answer() comes first

 private:
  std::string mine_ = random_bytes(nonce_bytes);
  std::string theirs_{};
};

struct AdmissionOptions {
  std::string name{};  // callers say it: that of the job, or of what they connect
  Secret secret{};
  std::size_t expected = 1;                                       // callers that may come at once
  std::chrono::milliseconds patience = std::chrono::seconds(10);  // the wait for a caller that has proved nothing
};

// A caller that knows the secret.
struct Arrival {
  std::unique_ptr<Connection> connection;
  Handshake handshake;
  Message hello;
};

// Used by one thread, which never waits here.
class Admission {
 public:
  // The listeners outlive this object.
  Admission(std::span<const Descriptor> listeners, AdmissionOptions options);
  Admission(const Descriptor& listener, AdmissionOptions options)
      : Admission(std::span(&listener, 1), std::move(options)) {}

  int events() const { return events_.get(); }  // a descriptor that is readable when serve() has work
  std::vector<Arrival> serve();

  // Keeps the connection until the other end has read the answer, for a second or two.
  void see_off(std::unique_ptr<Connection> connection);

  // The descriptor limit's error, if serve() lacked a descriptor although it had ended all other calls.
  std::optional<int> shortage() const { return shortage_; }
  void turn_away(const std::string& reason);  // the next connection, for which there is no descriptor

  // The callers that were refused, with the reasons: the first few, and how many more.
  std::vector<std::string> refused() const;

 private:
  using Clock = std::chrono::steady_clock;

  struct Caller {
    std::unique_ptr<Connection> connection;
    std::optional<Handshake> handshake;  // none: it has its answer
    Clock::time_point end;
  };
  using Callers = std::list<Caller>;

  void accept_all(const Descriptor& listener);
  bool accept_one(const Descriptor& listener);
  void add(std::unique_ptr<Connection> connection, std::optional<Handshake> handshake);
  void listen_for(const Connection& connection, int operation) const;
  bool hear(Caller& caller, std::vector<Arrival>& arrived);
  std::string reason_of_refusal(const std::optional<Message>& proved, const Message& said, OtherEnd end) const;
  void refuse(Connection& connection, const std::string& reason);
  Callers::iterator end_call(Callers::iterator caller);

  std::span<const Descriptor> listeners_;
  AdmissionOptions options_;
  Descriptor events_;
  Descriptor spare_;  // closed to accept a last connection when descriptors run out
  Callers callers_;   // the oldest first
  std::optional<int> shortage_{};
  std::vector<std::string> refused_;
  std::size_t refusals_ = 0;
};

}  // namespace ballast
