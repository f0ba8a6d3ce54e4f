// A GPU's streams, one for each lane that works there.
#pragma once

#include <array>
#include <memory>
#include <optional>

#include "kernels/backend.h"
#include "kernels/runtime/stream.h"
#include "zero/plan/program.h"

namespace ballast {

bool works_on_device(Lane lane);  // if there is a GPU

// Outlives everything that issues work into its streams, such as communicators.
class GpuLanes {
 public:
  explicit GpuLanes(int gpu = 0);  // B2101 or B2102 without a GPU

  int gpu() const { return gpu_; }
  const Stream& stream(Lane lane) const { return of(lane).stream; }
  kernels::Backend& backend(Lane lane) const { return *of(lane).backend; }
  void finish() const;  // waits for everything that was issued

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
