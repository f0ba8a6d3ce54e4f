// Frees the device tier's memory between steps, and reserves it again.
#pragma once

#include "zero/engine/arithmetic.h"
#include "zero/engine/off_plan.h"

namespace ballast {

// Used by the trainer's thread; all ranks together.
class DeviceOffload {
 public:
  // All of it outlives this.
  struct Parts {
    const RunningProgram& running;
    Slots& slots;
    const LaneArithmetic& arithmetic;
    Scheduler& scheduler;
    OffPlan& off_plan;
  };
  explicit DeviceOffload(const Parts& parts) : parts_(parts) {}

  bool is_offloaded() const { return is_offloaded_; }

  // offload() discards uses in forward since the last step: the next step begins anew.
  void offload(bool parameters, const AgreeOnMemory& agree);
  void reload(const AgreeOnMemory& agree);

 private:
  std::size_t device_bytes() const;

  Parts parts_;
  bool is_offloaded_ = false;
};

}  // namespace ballast
