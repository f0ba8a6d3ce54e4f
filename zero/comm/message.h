// The processes of a job, the messages between them and their hub (job.h), and the bytes of these on the wire.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ballast {

// The identity of a process in its job.
struct Member {
  std::size_t rank = 0;
  std::size_t size = 1;  // ranks of the job, as this process's environment says
  std::string host{};
  pid_t pid = 0;
  std::string machine{};           // the same for processes that can share memory, and for no others
  std::size_t ranks_per_host = 0;  // JobOptions::ranks_per_host: ranks of a host in the order of sums
};

Member this_process(std::size_t rank, std::size_t size, std::size_t ranks_per_host = 0);
std::string this_machine();

std::string text(const Member& member);                               // "rank 2 (node7, pid 4711)"
std::string died(const Member& member, const std::string& observer);  // the machine that has lost the connection
std::string left(const Member& member, const std::string& words);
// "=" stands for a host or a machine that is that of the member `before`: each rank gets the lines of all.
std::string to_line(const Member& member, const Member& before = {});
Member member_from(const std::string& line, const Member& before = {});  // throws B3303 for other text

struct Message {
  enum class Kind : std::uint8_t {
    challenge,  // the listener sends each caller random bytes at once (admission.h)
    hello,      // a caller tells the hub the job, a proof of its secret, and its identity
    // The hub tells all ranks, when all are connected, a proof of the secret, the secret of links, and their identities.
    welcome,
    later,    // the hub tells a rank that has left already: this job is ending, and the next has not begun
    refused,  // the hub tells a process that cannot join the reason
    share,    // a key, and the sender's Share
    shared,   // the answer, when all ranks of the group have shared: the key, and the values of all
    // The hub learns the ranks that the sender has waited for until the timeout; a key says that it was to share it.
    late,
    // All ranks learn that some are late, and say whom they wait for; the hub learns the same as with `late`, before
    // the timeout.
    waits,
    failed,   // the hub learns why the sender fails, and all ranks the first error. The key names ranks
    left,     // all ranks learn of a rank that has left, and its reason
    goodbye,  // the hub learns that the sender leaves, and its reason; with the key `failed`, all ranks fail
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
  std::size_t rank = 0;  // place in the group
  std::size_t size = 1;  // ranks of the group
  std::string value{};
};

std::string to_line(const Share& share);
std::optional<Share> share_from(const std::string& line);   // none for a line that is no share
std::string join(const std::vector<std::string>& values);   // values may have any bytes
std::vector<std::string> split(const std::string& joined);  // throws B3303 for other text

[[noreturn]] void fail_malformed();  // throws B3303 for a message that no rank sends

std::string to_wire(const Message& message);

inline constexpr std::size_t max_message_bytes = std::size_t{1} << 20;  // limit of a key, and of a value
inline constexpr std::size_t max_hello_bytes = std::size_t{4} << 10;

// Assembles messages from bytes as they arrive. It keeps no more bytes than one message and one add() have.
class Inbox {
 public:
  explicit Inbox(std::size_t most = max_message_bytes) : most_(most) {}

  void allow(std::size_t most) { most_ = most; }  // bytes of a key, and of a value, from now on
  void add(std::string_view bytes) { bytes_ += bytes; }
  std::optional<Message> next();  // throws B3303 for bytes of another protocol, and for a message that is too large

 private:
  std::size_t most_;
  std::string bytes_;
};

}  // namespace ballast
