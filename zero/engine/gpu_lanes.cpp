#include "zero/engine/gpu_lanes.h"

namespace ballast {

bool works_on_device(Lane lane) {
  switch (lane) {
    case Lane::gather:
    case Lane::reduce:
    case Lane::upload:
    case Lane::download:
    case Lane::update: return true;
    case Lane::compute:
    case Lane::host:
    case Lane::disk:
    case Lane::fetch: return false;
  }
  return false;
}

// Other ranks wait for its work.
static bool lets_ranks_wait(Lane lane) { return lane == Lane::gather || lane == Lane::reduce; }

GpuLanes::GpuLanes(int gpu) : gpu_(gpu) {
  for (std::size_t lane = 0; lane < lane_count; ++lane) {
    if (!works_on_device(static_cast<Lane>(lane))) continue;
    Stream stream(gpu, lets_ranks_wait(static_cast<Lane>(lane)) ? Stream::Priority::high : Stream::Priority::normal);
    auto backend = kernels::cuda_backend(stream.handle(), gpu);
    lanes_[lane] = OnGpu{std::move(stream), std::move(backend)};
  }
}

void GpuLanes::finish() const {
  for (const std::optional<OnGpu>& lane : lanes_) {
    if (lane) lane->stream.synchronize();
  }
}

}  // namespace ballast
