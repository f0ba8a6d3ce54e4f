// The functions of cuBLAS that the kernels call. It is loaded when it is first needed, so that the library works without it, and
// starts without waiting for it. Only sources of the CUDA backend may include this header.
#pragma once

#include <cublas_v2.h>

#include <string>

namespace ballast::kernels {

struct Cublas {
  decltype(&cublasCreate) create;
  decltype(&cublasDestroy) destroy;
  decltype(&cublasSetStream) set_stream;
  decltype(&cublasSetWorkspace) set_workspace;
  decltype(&cublasSetMathMode) set_math_mode;
  decltype(&cublasGetStatusString) status_string;
  // cublasGemmStridedBatchedEx. Its name is overloaded, so its type is written out.
  cublasStatus_t (*multiply)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void*,
                             const void*, cudaDataType, int, long long, const void*, cudaDataType, int, long long,
                             const void*, void*, cudaDataType, int, long long, int, cublasComputeType_t,
                             cublasGemmAlgo_t);
};

// Returns the functions of a shared library, which stays loaded. Throws B2103 if it cannot be loaded or lacks one of them.
Cublas load_cublas(const std::string& file);

// Loads the library at the first call, or finds the one that the process has loaded. Throws B2103 if there is none.
const Cublas& cublas();

}  // namespace ballast::kernels
