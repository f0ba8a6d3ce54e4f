#include "examples/llama/maths.h"

namespace ballast::llama {

std::unique_ptr<Maths> gpu_maths(std::size_t) {
  fail(Code::no_cuda_build, {.what = "cannot compute on a GPU: the Llama trainer was built without CUDA or cuBLAS"});
}

}  // namespace ballast::llama
