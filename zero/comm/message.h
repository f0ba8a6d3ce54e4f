// What the processes of a job and their hub (hub.h) tell each other, and its bytes on the wire.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ballast {

struct Message {
  enum class Kind : std::uint8_t {
    hello,    // to the hub: the job, and who I am
    welcome,  // to all when all are there: who they are
    later,    // to one who was there already and has left: this job is ending, the next is yet to begin
    refused,  // to one who cannot take part, and why
    set,      // a key and its value
    get,      // a key; the answer is a `set`, as soon as there is a value
    late,     // to the hub: the rank that I have waited for as long as I may
    failed,   // to the hub: I give up, and why. To all: the first error
    left,     // to all: a rank, and its last words
    goodbye,  // to the hub: I leave, and my last words; with the key `failed` if all others shall fail
  };
  Kind kind = Kind::goodbye;
  std::string key{};
  std::string value{};
  bool operator==(const Message&) const = default;
};

inline constexpr std::string_view key_of_failure = "failed";

std::string to_wire(const Message& message);

// Puts messages together from bytes as they arrive.
class Inbox {
 public:
  void add(std::string_view bytes) { bytes_ += bytes; }
  std::optional<Message> next();  // throws B3303 at bytes that are nobody's of ours

 private:
  std::string bytes_;
};

}  // namespace ballast
