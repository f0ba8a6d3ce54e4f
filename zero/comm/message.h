// The messages between the processes of a job and their hub (hub.h), and their bytes on the wire.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ballast {

struct Message {
  enum class Kind : std::uint8_t {
    hello,    // to the hub: the job, and the sender's identity
    welcome,  // to all ranks, when all are connected: their identities
    later,    // to a rank that has left already: this job is ending, and the next has not begun
    refused,  // to a process that cannot join: the reason
    set,      // a key and its value
    get,      // a key; the answer is a `set`, as soon as the key has a value
    share,  // a key, and the sender's Share; the answer is a `set` of all values, when all ranks of the group have shared
    late,     // to the hub: the rank that the sender has waited for until the timeout
    failed,   // to the hub: the reason for which the sender fails. To all ranks: the first error. The key names ranks
    left,     // to all ranks: a rank that has left, and its reason
    goodbye,  // to the hub: the sender leaves, and its reason; with the key `failed`, all ranks fail
  };
  Kind kind = Kind::goodbye;
  std::string key{};
  std::string value{};
  bool operator==(const Message&) const = default;
};

inline constexpr std::string_view key_of_failure = "failed";

std::string to_words(const std::vector<std::size_t>& ranks);  // "0 2"
std::vector<std::size_t> ranks_from(const std::string& words);

// A value of one of the ranks of a group, which all of them get.
struct Share {
  std::size_t rank = 0;  // in the group
  std::size_t size = 1;  // of the group
  std::string value{};
};

std::string to_line(const Share& share);
std::optional<Share> share_from(const std::string& line);  // none for a line that is no share
std::string join(const std::vector<std::string>& values);  // values may have any bytes
std::vector<std::string> split(const std::string& joined);

std::string to_wire(const Message& message);

// Assembles messages from bytes as they arrive.
class Inbox {
 public:
  void add(std::string_view bytes) { bytes_ += bytes; }
  std::optional<Message> next();  // throws B3303 for bytes of another protocol

 private:
  std::string bytes_;
};

}  // namespace ballast
