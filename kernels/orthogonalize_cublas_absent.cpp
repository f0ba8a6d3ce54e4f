#include <ballast/error.h>

#include "kernels/orthogonalize.h"

namespace ballast::kernels {

std::unique_ptr<Orthogonalizer> cuda_orthogonalizer(StreamHandle, int gpu) {
  device::require_gpu(gpu);
  fail(Code::no_cublas, {.what = "cannot multiply matrices on a GPU: this build of Ballast has no cuBLAS",
                         .available = "cuBLAS was missing when it was built",
                         .remedy = "build it where cuBLAS is (nvidia-cublas of PyPI will do)"});
}

}  // namespace ballast::kernels
