// A group of connected ranks, as Python holds it.
#pragma once

#include <ballast/comm.h>
#include <ballast/error.h>
#include <ballast/log.h>
#include <ballast/memory.h>
#include <ballast/placement.h>

#include <fmt/format.h>
#include <pthread.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/backend.h"
#include "python/bindings/bindings.h"

namespace ballast::python {

// The number of times that this process and its ancestors were forked, since the first call.
inline unsigned forks() {
  static std::atomic<unsigned> count = 0;
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++count; });
  static_cast<void>(registered);
  return count;
}

// Refuses calls of another thread while one runs: Python's lock is released meanwhile. A child of fork(), which has none of the
// library's threads, is refused at any time.
class OneThread {
 public:
  explicit OneThread(const char* what) : what_(what) {}

  // A call that works or waits, and lets Python's other threads run meanwhile. The thread may call again inside of its call, as a
  // callback does.
  class Working {
   public:
    explicit Working(const OneThread& of) : of_(of), is_inner_(of.caller_ == std::this_thread::get_id()) {
      of.require_this_process();
      std::thread::id none;
      require(
          is_inner_ || of.caller_.compare_exchange_strong(none, std::this_thread::get_id()), Code::out_of_order, [&] {
            return Problem{
                .what = fmt::format("cannot use {}: another thread is in a call of it", of.what_),
                .needed = "calls of one thread at a time",
                .remedy = "Make all calls of an optimizer and its model from one thread, or hold a lock around them."};
          });
      released_.emplace();
    }
    ~Working() {
      released_.reset();
      if (!is_inner_) of_.caller_ = std::thread::id();
    }
    Working(const Working&) = delete;

   private:
    const OneThread& of_;
    bool is_inner_;
    std::optional<py::gil_scoped_release> released_{};
  };

 private:
  void require_this_process() const {
    require(forks_ == forks(), Code::unsupported, [&] {
      return Problem{.what = fmt::format("cannot use {}: this process is a fork of a rank, and no rank itself", what_),
                     .remedy = "Train in the process that has called ballast.wrap()."};
    });
  }

  const char* what_;
  unsigned forks_ = forks();
  mutable std::atomic<std::thread::id> caller_{};
};

// A communicator with its backend and accounts. When the process ends, it says goodbye to the ranks of the groups that it has not
// left. A child of fork() does not: it is no rank. Any thread may call.
class OpenGroup {
 public:
  OpenGroup() : backend_(kernels::cpu_backend()), process_(::getpid()) {}
  ~OpenGroup();
  OpenGroup(const OpenGroup&) = delete;
  kernels::Backend& backend() { return *backend_; }
  MemoryAccounts& accounts() { return accounts_; }
  Log& warnings() { return warnings_; }  // writes to stderr: threads that log must not wait for Python's lock
  Communicator& communicator() { return *communicator_; }
  // False in a child that was forked from the group's process.
  bool is_of_this_process() const { return process_ == ::getpid(); }

  void begin(std::unique_ptr<Communicator> communicator);
  void count_steps(std::uint64_t steps);  // those made so far, by the optimizer whose group this is

  // The reason of a rank that leaves: "it closed its optimizer after 3 steps".
  std::string closing_words() const;
  LeaveReason farewell_of_process(int exit_code) const;

 private:
  static constexpr std::uint64_t no_optimizer = UINT64_MAX;
  std::string after_steps() const;

  std::unique_ptr<kernels::Backend> backend_;
  MemoryAccounts accounts_;
  Log warnings_{Log::to_stderr, Level::warning};
  std::unique_ptr<Communicator> communicator_;
  pid_t process_;
  std::atomic<std::uint64_t> steps_ = no_optimizer;
};

struct Rendezvous {
  Typed<"ballast.ranks.Store | None"> store;
  std::optional<std::size_t> rank;
  std::optional<std::size_t> size;
  std::string host;  // the host of rank 0, as the others reach it
  std::string job;
  std::optional<double> timeout;  // seconds
};

// A communicator. Calls that wait for other ranks let Python's other threads run. A child of fork() has no group: there
// a call is an error, and leaving does nothing.
class Group {
 public:
  explicit Group(const Rendezvous& where);
  Group(const Group&) = delete;
  // Leaves, and waits for no other rank: Python's collector may call it at any moment, on one rank long before the
  // others. While Python ends, it leaves the goodbye to the end of the process, when the exit code is known.
  ~Group();

  std::size_t rank() const { return rank_; }
  std::size_t size() const { return size_; }
  Communicator& communicator() const;

  // Calls `work` with the communicator, which waits for other ranks: one thread at a time, and without Python's lock.
  template <class Work>
  auto working(const Work& work) const {
    Communicator& group = communicator();
    const OneThread::Working working(thread_);
    return work(group);
  }

  SentBytes sent() const { return open_ == nullptr ? SentBytes{} : open_->communicator().sent(); }
  void abort(const std::string& reason) const;
  std::vector<std::size_t> failed_ranks() const;  // works after leave() too
  void count_steps(std::uint64_t steps) const { open_->count_steps(steps); }

  // Says goodbye, with this reason, or with closing_words(). The communicator is freed with this object.
  void leave(const std::optional<LeaveReason>& leave_reason = {});
  void close();  // the same, and frees it; rank 0 waits until the others have left, or the timeout

 private:
  void free();

  OneThread thread_{"the group"};
  std::unique_ptr<OpenGroup> open_;
  std::size_t rank_ = 0;
  std::size_t size_ = 1;
  bool is_closed_ = false;
};

}  // namespace ballast::python
