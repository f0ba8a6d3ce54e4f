// Where the arithmetic happens. One interface over all kernels; a CPU and a CUDA implementation give the same bits.
#pragma once

#include <memory>

#include "kernels/simd/isa.h"
#include "kernels/update.h"

namespace ballast::kernels {

// Views must lie in memory that the backend reaches: host memory for the CPU, device or pinned memory for CUDA.
// The CPU backend is done when a call returns. The CUDA backend orders its work on its stream and returns at once;
// arguments other than memory are copied before that.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual void update(const UpdateTile& tile, std::span<const Run> runs, std::span<const GroupStep> groups) = 0;
};

struct CpuOptions {
  int threads = 0;                                    // 0: the cores this process may use
  simd::Isa isa = simd::usable_isas().front();
};

std::unique_ptr<Backend> cpu_backend(CpuOptions options = {});

}  // namespace ballast::kernels
