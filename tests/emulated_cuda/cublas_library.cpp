// The emulated cuBLAS as Ballast's.
#include "kernels/cublas.h"

namespace ballast::kernels {

const Cublas& cublas() {
  static constexpr Cublas emulated{.create = &cublasCreate,
                                   .destroy = &cublasDestroy,
                                   .set_stream = &cublasSetStream,
                                   .set_workspace = &cublasSetWorkspace,
                                   .set_math_mode = &cublasSetMathMode,
                                   .status_string = &cublasGetStatusString,
                                   .multiply = &cublasGemmStridedBatchedEx};
  return emulated;
}

}  // namespace ballast::kernels
