// The cases of the GPU benchmark: kernels, relative to a copy in the GPU's memory, and transfers, relative to a long one.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "benchmarks/gpu/gpu.h"

namespace ballast::benchmarks {

struct GpuCase {
  std::string name;
  std::string against;
  std::function<Subject(TestedGpu&)> make;  // called when its turn comes: only one case holds memory at a time
  std::function<Subject(TestedGpu&)> make_against;
};

// `elements` is the size of the large arrays, which must not fit the caches.
std::vector<GpuCase> kernel_cases(std::size_t elements);
std::vector<GpuCase> transfer_cases(std::size_t bytes);

}  // namespace ballast::benchmarks
