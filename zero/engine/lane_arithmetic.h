// The arithmetic of each lane: the same operations, in the lane's own stream or on the host.
#pragma once

#include <array>
#include <optional>

#include "zero/engine/arithmetic.h"
#include "zero/engine/gpu_lanes.h"

namespace ballast {

class LaneArithmetic {
 public:
  // All arguments outlive this. Without a GPU every lane works on the host, with `cpu`.
  LaneArithmetic(const CompiledPlan& plan, const Slots& slots, kernels::Backend& cpu, const GpuLanes* gpu);
  LaneArithmetic(LaneArithmetic&&) = delete;

  const Arithmetic& of(Lane lane) const { return *lanes_[static_cast<std::size_t>(lane)]; }

  // Copies and clears memory of the device tier between steps.
  const ExecContext& copies() const { return of(Lane::upload).context(); }

 private:
  std::array<std::optional<Arithmetic>, lane_count> lanes_;
};

}  // namespace ballast
