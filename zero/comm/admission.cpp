#include "zero/comm/admission.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sodium.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <iterator>

namespace ballast {
namespace {

static_assert(proof_bytes == crypto_auth_BYTES);

// Any thread may call it, any number of times.
void begin_sodium() {
  require(::sodium_init() >= 0, Code::internal, [] { return Problem{.what = "cannot start libsodium"}; });
}

const unsigned char* octets_of(std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); }

// The random bytes have fixed lengths, and the name has its length before it: no two statements are the same text.
std::string statement_of_hello(const std::string& listeners, const std::string& callers, const std::string& name,
                               const std::string& words) {
  return fmt::format("hello {}{}{} {}{}", listeners, callers, name.size(), name, words);
}

std::string statement_of_welcome(const std::string& listeners, const std::string& callers, const std::string& words) {
  return fmt::format("welcome {}{}{}", listeners, callers, words);
}

constexpr std::size_t strangers = 64;         // that may connect in addition to the expected callers
constexpr std::size_t accepted_at_once = 64;  // a bound, so that the owner's other connections have their turn
constexpr std::size_t most_refusals = 8;      // that are kept
constexpr std::size_t most_printed = 100;     // letters of a name that a stranger says
constexpr auto time_to_read_answer = std::chrono::seconds(2);

Descriptor accept_from(const Descriptor& listener) {
  return Descriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
}

std::string printable(const std::string& said) {
  std::string text = said.substr(0, most_printed);
  std::ranges::replace_if(
      text, [](unsigned char letter) { return std::isprint(letter) == 0; }, '?');
  return text;
}

}  // namespace

std::string random_bytes(std::size_t count) {
  begin_sodium();
  std::string bytes(count, '\0');
  ::randombytes_buf(bytes.data(), bytes.size());
  return bytes;
}

std::string random_secret() {
  const std::string bytes = random_bytes(32);
  return fmt::format("{:02x}", fmt::join(std::span(octets_of(bytes), bytes.size()), ""));
}

Secret::Secret(std::string_view words) : is_known_to_all_(words.empty()) {
  static_assert(sizeof key_ == crypto_auth_KEYBYTES);
  begin_sodium();
  ::crypto_generichash(key_.data(), key_.size(), octets_of(words), words.size(), nullptr, 0);
}

std::string Secret::proof(std::string_view statement) const {
  std::string proof(proof_bytes, '\0');
  ::crypto_auth(reinterpret_cast<unsigned char*>(proof.data()), octets_of(statement), statement.size(), key_.data());
  return proof;
}

bool Secret::proves(std::string_view proof, std::string_view statement) const {
  return proof.size() == proof_bytes &&
         ::crypto_auth_verify(octets_of(proof), octets_of(statement), statement.size(), key_.data()) == 0;
}

std::optional<Message> Handshake::read(const Message& hello, const Secret& secret) {
  if (hello.value.size() < nonce_bytes + proof_bytes) return std::nullopt;
  theirs_ = hello.value.substr(0, nonce_bytes);
  const std::string proof = hello.value.substr(nonce_bytes, proof_bytes);
  const std::string words = hello.value.substr(nonce_bytes + proof_bytes);
  if (!secret.proves(proof, statement_of_hello(mine_, theirs_, hello.key, words))) return std::nullopt;
  return Message{hello.kind, hello.key, words};
}

Message Handshake::welcome(const std::string& words, const Secret& secret) const {
  return {Message::Kind::welcome, secret.proof(statement_of_welcome(mine_, theirs_, words)), words};
}

Message Handshake::answer(const Message& challenge, Message hello, const Secret& secret) {
  theirs_ = challenge.value;
  hello.value = mine_ + secret.proof(statement_of_hello(theirs_, mine_, hello.key, hello.value)) + hello.value;
  return hello;
}

bool Handshake::proves(const Message& welcome, const Secret& secret) const {
  return theirs_.size() == nonce_bytes &&
         secret.proves(welcome.key, statement_of_welcome(theirs_, mine_, welcome.value));
}

Admission::Admission(std::span<const Descriptor> listeners, AdmissionOptions options)
    : listeners_(listeners),
      options_(std::move(options)),
      events_(require_descriptor(::epoll_create1(EPOLL_CLOEXEC), "cannot wait for connections of ranks")),
      spare_(require_descriptor(::eventfd(0, EFD_CLOEXEC), "cannot wait for connections of ranks")) {
  for (const Descriptor& listener : listeners_) {
    epoll_event event{.events = EPOLLIN, .data = {}};
    ::epoll_ctl(events_.get(), EPOLL_CTL_ADD, listener.get(), &event);
  }
}

std::vector<Arrival> Admission::serve() {
  std::vector<Arrival> arrived;
  shortage_.reset();
  const Clock::time_point now = Clock::now();
  for (auto caller = callers_.begin(); caller != callers_.end();) {
    const bool stays = now < caller->end && hear(*caller, arrived);
    caller = stays ? std::next(caller) : end_call(caller);
  }
  for (const Descriptor& listener : listeners_) {
    accept_all(listener);
  }
  return arrived;
}

void Admission::accept_all(const Descriptor& listener) {
  std::size_t accepted = 0;
  while (accepted < accepted_at_once && accept_one(listener)) {
    ++accepted;
  }
}

// Returns false if none waits, or there is no descriptor for it.
bool Admission::accept_one(const Descriptor& listener) {
  pollfd waiting{listener.get(), POLLIN, 0};
  if (::poll(&waiting, 1, 0) <= 0)
    return false;  // accept() would say that there is no descriptor, even for no connection
  Descriptor socket = accept_from(listener);
  while (!socket && is_descriptor_limit(errno) && !callers_.empty()) {
    end_call(callers_.begin());
    socket = accept_from(listener);
  }
  if (!socket) {
    if (is_descriptor_limit(errno)) shortage_ = errno;
    return errno == ECONNABORTED;
  }
  auto connection = std::make_unique<Connection>(std::move(socket), max_hello_bytes);
  Handshake handshake;
  connection->post(handshake.challenge());
  add(std::move(connection), std::move(handshake));
  return true;
}

void Admission::add(std::unique_ptr<Connection> connection, std::optional<Handshake> handshake) {
  const auto time = handshake ? options_.patience : std::chrono::milliseconds(time_to_read_answer);
  listen_for(*connection, EPOLL_CTL_ADD);
  callers_.push_back({std::move(connection), std::move(handshake), Clock::now() + time});
  if (callers_.size() > options_.expected + strangers) end_call(callers_.begin());
}

void Admission::listen_for(const Connection& connection, int operation) const {
  epoll_event event{.events = EPOLLIN, .data = {}};
  ::epoll_ctl(events_.get(), operation, connection.socket().get(), &event);
}

// Returns false if the call is over: the caller has arrived, is gone, or sends something else.
bool Admission::hear(Caller& caller, std::vector<Arrival>& arrived) {
  Connection& connection = *caller.connection;
  try {
    const bool is_open = connection.receive(std::chrono::milliseconds(0));
    std::optional<Message> said = connection.next();
    if (!caller.handshake) return is_open && !said;
    if (!said) return is_open;
    if (said->kind != Message::Kind::hello) return false;
    std::optional<Message> hello = caller.handshake->read(*said, options_.secret);
    const OtherEnd end =
        hello && options_.secret.is_known_to_all() ? other_end_of(connection.socket()) : OtherEnd::accepted;
    if (end == OtherEnd::gone) return false;
    const std::string reason = reason_of_refusal(hello, *said, end);
    if (reason.empty()) {
      connection.allow(max_message_bytes);
      listen_for(connection, EPOLL_CTL_DEL);
      arrived.push_back({std::move(caller.connection), std::move(*caller.handshake), std::move(*hello)});
      return false;
    }
    refuse(connection, reason);
    caller.handshake.reset();
    caller.end = Clock::now() + time_to_read_answer;
    return true;
  } catch (const Error& error) {  // else these are no bytes of a Ballast process, or of another version's
    if (error.code() == Code::system_limit) shortage_ = EMFILE;
  } catch (const std::exception&) {  // there is no memory for them
  }
  return false;
}

// Empty if the caller may come in.
std::string Admission::reason_of_refusal(const std::optional<Message>& proved, const Message& said,
                                         OtherEnd end) const {
  if (!proved && said.key != options_.name) {
    return fmt::format("job \"{}\" uses this address, not job \"{}\"", options_.name, printable(said.key));
  }
  if (!proved) return "it does not know the secret of the job: BALLAST_SECRET differs, or is set on some ranks only";
  if (end == OtherEnd::foreign) {
    return "it is a process of another user, and the job has no secret: set BALLAST_SECRET on all ranks";
  }
  return {};
}

void Admission::refuse(Connection& connection, const std::string& reason) {
  connection.post({.kind = Message::Kind::refused, .value = reason});
  ++refusals_;
  if (refused_.size() < most_refusals) {
    refused_.push_back(fmt::format("a process at {}: {}", other_end(connection.socket()), reason));
  }
}

std::vector<std::string> Admission::refused() const {
  std::vector<std::string> texts = refused_;
  if (refusals_ > texts.size()) texts.push_back(fmt::format("and {} more", refusals_ - texts.size()));
  return texts;
}

Admission::Callers::iterator Admission::end_call(Callers::iterator caller) {
  if (caller->connection) listen_for(*caller->connection, EPOLL_CTL_DEL);
  return callers_.erase(caller);
}

void Admission::see_off(std::unique_ptr<Connection> connection) {
  connection->allow(max_hello_bytes);
  add(std::move(connection), std::nullopt);
}

// The process, and all other ranks, would wait until the timeout without an answer.
void Admission::turn_away(const std::string& reason) {
  spare_ = Descriptor();
  for (const Descriptor& listener : listeners_) {
    Descriptor socket = accept_from(listener);
    if (!socket) continue;
    Connection connection(std::move(socket));
    connection.post({.kind = Message::Kind::refused, .value = reason});
  }
  spare_ = Descriptor(::eventfd(0, EFD_CLOEXEC));
}

}  // namespace ballast
