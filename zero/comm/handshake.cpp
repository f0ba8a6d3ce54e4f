#include "zero/comm/handshake.h"

#include <fmt/format.h>

namespace ballast {
namespace {

// The random bytes have fixed lengths, and the name has its length before it: no two statements are the same text.
std::string statement_of_hello(const std::string& listeners, const std::string& callers, const std::string& name,
                               const std::string& words) {
  return fmt::format("hello {}{}{} {}{}", listeners, callers, name.size(), name, words);
}

std::string statement_of_welcome(const std::string& listeners, const std::string& callers, const std::string& words) {
  return fmt::format("welcome {}{}{}", listeners, callers, words);
}

}  // namespace

std::optional<Message> ListenersHandshake::read(const Message& hello, const Secret& secret) {
  if (hello.value.size() < nonce_bytes + proof_bytes) return std::nullopt;
  theirs_ = hello.value.substr(0, nonce_bytes);
  const std::string proof = hello.value.substr(nonce_bytes, proof_bytes);
  const std::string words = hello.value.substr(nonce_bytes + proof_bytes);
  if (!secret.proves(proof, statement_of_hello(mine_, theirs_, hello.key, words))) return std::nullopt;
  return Message{hello.kind, hello.key, words};
}

Message ListenersHandshake::welcome(const std::string& words, const Secret& secret) const {
  return {Message::Kind::welcome, secret.proof(statement_of_welcome(mine_, theirs_, words)), words};
}

Message CallersHandshake::answer(const Message& challenge, Message hello, const Secret& secret) {
  theirs_ = challenge.value;
  hello.value = mine_ + secret.proof(statement_of_hello(theirs_, mine_, hello.key, hello.value)) + hello.value;
  return hello;
}

bool CallersHandshake::proves(const Message& welcome, const Secret& secret) const {
  return theirs_.size() == nonce_bytes &&
         secret.proves(welcome.key, statement_of_welcome(theirs_, mine_, welcome.value));
}

}  // namespace ballast
