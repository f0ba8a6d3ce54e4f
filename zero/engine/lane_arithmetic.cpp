#include "zero/engine/arithmetic.h"

namespace ballast {

LaneArithmetic::LaneArithmetic(const CompiledPlan& plan, const Slots& slots, kernels::Backend& cpu,
                               const GpuLanes* gpu) {
  for (std::size_t i = 0; i < lane_count; ++i) {
    const Lane lane = static_cast<Lane>(i);
    const bool on_gpu = gpu != nullptr && works_on_device(lane);
    lanes_[i].emplace(plan, slots, on_gpu ? ExecContext(gpu->backend(lane), gpu->stream(lane)) : ExecContext(cpu));
  }
}

}  // namespace ballast
