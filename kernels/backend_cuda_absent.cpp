#include <ballast/error.h>

#include "kernels/backend.h"

namespace ballast::kernels {

std::unique_ptr<Backend> cuda_backend(StreamHandle, int) {
  fail(Code::no_cuda_build, {.what = "cannot use the CUDA kernels: this build has none"});
}

}  // namespace ballast::kernels
