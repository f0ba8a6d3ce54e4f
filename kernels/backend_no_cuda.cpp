#include "kernels/backend.h"
#include "kernels/runtime/error.h"

namespace ballast::kernels {

std::unique_ptr<Backend> cuda_backend(StreamHandle, int) {
  fail(Code::no_cuda_build, {.what = "the CUDA kernels were asked for, but this build has none"});
}

}  // namespace ballast::kernels
