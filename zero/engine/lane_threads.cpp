#include "zero/engine/lane_threads.h"

#include "kernels/runtime/cores.h"

namespace ballast {
namespace {

bool moves_data(Lane lane) { return lane != Lane::compute && lane != Lane::update && lane != Lane::host; }

}  // namespace

LaneThreads::LaneThreads(const GpuLanes* gpu) {
  for (std::size_t i = 0; i < lane_count; ++i) {
    const Lane lane = static_cast<Lane>(i);
    if (lane == Lane::compute) continue;
    threads_[i] = std::make_unique<LaneThread>();
    if (moves_data(lane)) threads_[i]->add(use_short_time_slices).wait();
    if (gpu != nullptr) {  // also for lanes of the host: they wait for events, which CUDA does on the current GPU
      threads_[i]->add([number = gpu->gpu()] { device::choose_gpu(number); }).wait();
    }
  }
}

void LaneThreads::stop() {
  for (std::unique_ptr<LaneThread>& thread : threads_) {
    thread.reset();
  }
}

}  // namespace ballast
