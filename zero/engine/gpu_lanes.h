// A GPU's streams, one for each lane that works there.
#pragma once

#include <array>
#include <memory>
#include <optional>

#include "kernels/backend.h"
#include "kernels/runtime/stream.h"
#include "zero/plan/program.h"

namespace ballast {

bool works_on_device(Lane lane);

// Outlives what is issued into the streams, communicators among them.
class GpuLanes {
 public:
  explicit GpuLanes(int gpu = 0);  // without a GPU: B2101, B2102

  int gpu() const { return gpu_; }
  const Stream& stream(Lane lane) const { return of(lane).stream; }
  kernels::Backend& backend(Lane lane) const { return *of(lane).backend; }
  void finish() const;  // waits for all that was issued

 private:
  struct OnGpu {
    Stream stream;
    std::unique_ptr<kernels::Backend> backend;
  };
  const OnGpu& of(Lane lane) const { return *lanes_[static_cast<std::size_t>(lane)]; }

  int gpu_;
  std::array<std::optional<OnGpu>, lane_count> lanes_;
};

}  // namespace ballast
