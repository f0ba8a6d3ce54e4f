// The first messages of a connection. In them both ends prove that they know the job's secret:
//
//   the listener: challenge    random bytes of the listener
//   the caller:   hello        a name, random bytes of the caller, its proof, and its words
//   the listener: welcome      its proof, and its words
//
// A proof covers the random bytes of both ends and the words, so a recorded one is of no use for another connection. What
// follows on the connection is neither proved nor encrypted.
#pragma once

#include <optional>
#include <string>

#include "zero/comm/message.h"
#include "zero/comm/secret.h"

namespace ballast {

inline constexpr std::size_t nonce_bytes = 32;

class ListenersHandshake {
 public:
  ListenersHandshake() : mine_(random_bytes(nonce_bytes)) {}

  Message challenge() const { return {.kind = Message::Kind::challenge, .value = mine_}; }
  // Returns the hello with the caller's words as its value; none if its proof is wrong.
  std::optional<Message> read(const Message& hello, const Secret& secret);
  Message welcome(const std::string& words, const Secret& secret) const;  // after read()

 private:
  std::string mine_;
  std::string theirs_{};
};

class CallersHandshake {
 public:
  CallersHandshake() : mine_(random_bytes(nonce_bytes)) {}

  Message answer(const Message& challenge, Message hello, const Secret& secret);
  bool proves(const Message& welcome, const Secret& secret) const;  // after answer()

 private:
  std::string mine_;
  std::string theirs_{};
};

}  // namespace ballast
