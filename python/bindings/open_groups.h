// The groups that this process has not left. When it ends, it says goodbye to their ranks.
#pragma once

#include <ballast/comm.h>
#include <ballast/log.h>
#include <ballast/memory.h>

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "kernels/backend.h"

namespace ballast::python {

// A communicator with its backend and accounts. Any thread may call.
class OpenGroup {
 public:
  OpenGroup();
  kernels::Backend& backend() { return *backend_; }
  MemoryAccounts& accounts() { return accounts_; }
  Log& warnings() { return warnings_; }  // on stderr: threads that log must not wait for Python's lock
  Communicator& communicator() { return *communicator_; }
  bool is_of_this_process() const;  // not of the process that this one was forked from

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

// After remember(), the process says goodbye when it ends, unless it left before. A child of fork() does not: it is no
// rank.
void remember(OpenGroup& group);
void forget(OpenGroup& group);

}  // namespace ballast::python
