#include "zero/engine/step_run.h"

#include "zero/plan/program.h"

namespace ballast {

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
