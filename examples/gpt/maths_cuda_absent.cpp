#include "examples/gpt/maths.h"

namespace ballast::gpt {

std::unique_ptr<Maths> gpu_maths(StreamHandle, int) {
  fail(Code::no_cuda_build, {.what = "cannot compute on a GPU: the GPT trainer was built without CUDA or cuBLAS"});
}

}  // namespace ballast::gpt
