// Reads, writes and flushes that go on while their caller does something else. One interface; what is done with an answer
// of the system is the same in all implementations, see transfer.h.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "kernels/runtime/log.h"
#include "offload/completion.h"
#include "offload/transfer.h"

namespace ballast::offload {

// Any thread may call. A queue ends when what is in flight is done.
class IoQueue {
 public:
  virtual ~IoQueue() = default;

  // Ends with all bytes moved, or with an error that names operation, file, offset and cause. File and memory stay until
  // then. Waits while as many requests are in flight as the queue is deep. Requests have no order among each other.
  virtual Completion submit(const IoRequest& request) = 0;

  // Memory and files that many requests will use; forgotten before they go. Using them is then cheaper, that is all.
  virtual void remember(std::span<std::byte> memory) = 0;
  virtual void forget(std::span<std::byte> memory) = 0;
  virtual void remember(const File& file) = 0;
  virtual void forget(const File& file) = 0;

  virtual std::string_view kind() const = 0;  // "io_uring", "threads", "one thread"
};

struct IoOptions {
  std::size_t depth = 16;  // requests at once, at least 1
  Log* log = nullptr;      // outlives the queue
};

const IoOptions& checked(const IoOptions& options);  // throws what is wrong with them

// The best that this machine has: io_uring, or threads, which says why.
std::unique_ptr<IoQueue> open_queue(const IoOptions& options = {});

// Where the kernel, a container or this build has none: B2201.
std::unique_ptr<IoQueue> uring_queue(const IoOptions& options = {});

// How a ring's thread enters the kernel, and how often that may be refused before the thread makes blocking calls instead.
// Tests give it a kernel that refuses.
struct RingEntry {
  // `call` hands over so many new requests, waits for an answer, and returns 0 or more, or -errno.
  std::function<int(std::size_t requests, const std::function<int()>& call)> enter =
      [](std::size_t, const std::function<int()>& call) { return call(); };
  std::size_t most_refusals = 10'000;  // in a row; a signal (EINTR) is none
  std::chrono::milliseconds pause{1};  // after each
};
std::unique_ptr<IoQueue> uring_queue(const IoOptions& options, const RingEntry& entry);

// One system call: the answer to a request, as Transfer takes it.
using IoCall = std::function<std::int64_t(const IoRequest& request)>;
std::int64_t system_call(const IoRequest& request);

// All of a transfer, in blocking calls: what it failed with, or null.
std::exception_ptr move_all(Transfer& transfer, const IoCall& call);

// As many threads as the queue is deep, each in blocking calls. Tests give it calls that fail.
std::unique_ptr<IoQueue> thread_queue(const IoOptions& options = {}, IoCall call = system_call);

}  // namespace ballast::offload
