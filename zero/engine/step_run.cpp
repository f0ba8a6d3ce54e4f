#include "zero/engine/step_run.h"

#include <ballast/error.h>

#include <atomic>

#include "zero/plan/program.h"

namespace ballast {

bool OpStatus::has_succeeded() const {
  if (!begun.is_done() || (read && !read->completion().is_done()) || !written.is_done()) return false;
  try {
    wait_on_host();  // it has ended
  } catch (...) {
    return false;
  }
  return true;
}

void OpStatus::wait() const {
  begun.wait();
  if (on_gpu) on_gpu->end.synchronize();
  wait_on_host();
}

void OpStatus::wait_on_host() const {
  begun.wait();
  if (read) read->completion().wait();
  written.wait();
}

// A rule of whole matrices changes the record between its two updates.
void OpStatus::check_record() const {
  std::atomic_ref<bool> checked(is_checked);
  if (!read || checked) return;
  read->check();
  checked = true;
}

void OpStatus::accept_record() {
  check_record();
  read.reset();
}

// No stream ever waits for a drive: the thread does.
void OpStatus::wait_in(const ExecContext& context) const {
  begun.wait();
  require(on_gpu || !in_stream, Code::internal,
          [] { return Problem{.what = "cannot wait for an operation: its end in a stream is not marked"}; });
  if (context.stream() == nullptr || !on_gpu) return wait();
  context.stream()->wait_for(on_gpu->end);
}

void StepRun::follow(const std::vector<Op>& operations) {
  list = &operations;
  ops = std::vector<OpStatus>(operations.size());
  const std::vector<bool> awaited = awaited_in(operations);
  for (std::size_t op = 0; op < ops.size(); ++op) {
    ops[op].is_awaited = awaited[op];
  }
}

// Waits from the end, so that the calling thread is woken once for each lane, not once for each operation.
void StepRun::wait() const {
  for (std::size_t op = ops.size(); op-- > 0;) {
    ops[op].wait();
  }
}

void StepRun::wait_on_host() const {
  for (std::size_t op = ops.size(); op-- > 0;) {
    ops[op].wait_on_host();
  }
}

StepRuns::StepRuns(const Stream* timed) {
  for (StepRun& run : runs_) {
    if (timed != nullptr) run.clock.emplace(timed->gpu());
  }
}

const StepRun& StepRuns::before(const StepRun& run) const {
  const auto number = static_cast<std::size_t>(&run - runs_.data());
  return runs_[(number + runs_.size() - 1) % runs_.size()];
}

void StepRuns::advance() {
  ++step_;
  if (current().clock) current().clock->set();
}

void StepRuns::follow(const std::vector<Op>& operations) {
  for (StepRun& run : runs_) {
    run.follow(operations);
  }
}

void StepRuns::set_clocks() {
  for (StepRun& run : runs_) {
    if (run.clock) run.clock->set();
  }
}

}  // namespace ballast
