// Turns a CUDA status into an error. Only sources of the CUDA backend may include this header, because it includes
// CUDA's.
#pragma once

#include <ballast/error.h>

#include <cuda_runtime_api.h>

#include <string_view>

namespace ballast {

[[noreturn]] void cuda_failed(cudaError_t status, std::string_view what, Site site);

// Use after a launch: check_cuda(cudaGetLastError(), "launching adamw").
inline void check_cuda(cudaError_t status, std::string_view what, Site site = Site::here()) {
  if (status != cudaSuccess) [[unlikely]] {
    cuda_failed(status, what, site);
  }
}

}  // namespace ballast
