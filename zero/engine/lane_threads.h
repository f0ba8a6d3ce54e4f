// One thread for each lane but the trainer's own, which is `compute`.
#pragma once

#include <array>
#include <memory>

#include "zero/engine/gpu_lanes.h"

namespace ballast {

// Used by one thread, the trainer's.
class LaneThreads {
 public:
  explicit LaneThreads(const GpuLanes* gpu);  // null: every lane works on the host

  LaneThread& of(Lane lane) { return *threads_[static_cast<std::size_t>(lane)]; }
  void stop();  // finishes what was added to each lane, then ends its thread

 private:
  std::array<std::unique_ptr<LaneThread>, lane_count> threads_;
};

}  // namespace ballast
