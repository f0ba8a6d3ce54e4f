// Asynchronous reads, writes and flushes. All implementations handle the system's answers in the same way: see Transfer.
#pragma once

#include <ballast/log.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "offload/completion.h"
#include "offload/file.h"

namespace ballast::offload {

enum class IoKind { read, write, flush };
std::string_view name(IoKind kind);

struct IoRequest {
  IoKind kind = IoKind::read;
  const File* file = nullptr;
  std::uint64_t offset = 0;
  std::span<std::byte> memory{};  // a write only reads it; a flush has none
};

// The progress of a request. Every queue passes the system's answers to a Transfer, so that one place decides when a request has
// ended, has failed or is repeated. A Transfer makes no system call. Used by one thread at a time.
class Transfer {
 public:
  enum class Next { finished, again, failed };

  explicit Transfer(const IoRequest& request) : request_(request) {}

  // Returns the request for the bytes that remain.
  IoRequest rest() const;

  // Takes the answer to rest(): the number of bytes moved, or -errno.
  Next take(std::int64_t answer);

  // Returns whether the last answer was a refusal (EAGAIN): the next attempt should block, or be made a little later.
  bool refused() const { return refusals_ > 0; }

  std::exception_ptr error() const;                                // the error after Next::failed
  std::exception_ptr lost_flush(const std::string& reason) const;  // the error of a flush without an answer

 private:
  Next refuse(int error);
  Next fail(int error);

  IoRequest request_;
  std::size_t done_ = 0;
  int refusals_ = 0;  // refusals in a row
  int error_ = 0;
};

// Any thread may call. The destructor waits for the requests in flight.
class IoQueue {
 public:
  virtual ~IoQueue() = default;

  // Starts a request. It ends with all bytes moved, or with an error that names operation, file, offset and cause; file
  // and memory must live until then. Blocks while `depth` requests are in flight. Requests are not ordered.
  virtual Completion submit(const IoRequest& request) = 0;

  // Registers memory or a file that many requests will use, which makes these requests cheaper. Forget it before it is
  // freed or closed.
  virtual void remember(std::span<std::byte> memory) = 0;
  virtual void forget(std::span<std::byte> memory) = 0;
  virtual void remember(const File& file) = 0;
  virtual void forget(const File& file) = 0;

  virtual std::string_view kind() const = 0;  // "io_uring", "threads", "one thread"
};

struct IoOptions {
  std::size_t depth = 16;  // requests in flight, at least 1
  Log* log = nullptr;      // outlives the queue
};

const IoOptions& checked(const IoOptions& options);  // throws B1001 if they are invalid

// Opens io_uring if this machine has it; else threads, with a message in the log that says why.
std::unique_ptr<IoQueue> open_queue(const IoOptions& options = {});

// Configures how a ring's thread enters the kernel, and after how many refusals it makes blocking calls instead. Tests
// replace `enter` by a kernel that refuses.
struct RingEntry {
  // `call` submits `requests` new requests, waits for an answer, and returns 0 or more, or -errno.
  std::function<int(std::size_t requests, const std::function<int()>& call)> enter =
      [](std::size_t, const std::function<int()>& call) { return call(); };
  std::size_t max_refusals = 10'000;   // refusals in a row; an interruption (EINTR) does not count
  std::chrono::milliseconds pause{1};  // the pause after each refusal
};
// Throws B2201 if the kernel, the container or this build has no io_uring.
std::unique_ptr<IoQueue> uring_queue(const IoOptions& options = {}, const RingEntry& entry = {});

// One system call, which returns the answer to a request in the form that Transfer::take() reads.
using IoCall = std::function<std::int64_t(const IoRequest& request)>;
std::int64_t system_call(const IoRequest& request);

// Moves all bytes of a transfer in blocking calls. Returns the error, or null.
std::exception_ptr move_all(Transfer& transfer, const IoCall& call);

// A queue of `depth` threads that make blocking calls. Tests replace `call` by one that fails.
std::unique_ptr<IoQueue> thread_queue(const IoOptions& options = {}, IoCall call = system_call);

}  // namespace ballast::offload
