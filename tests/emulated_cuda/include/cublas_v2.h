// The part of cuBLAS that Ballast calls. tests/emulated_cuda implements it in plain C++.
#pragma once

#include "tests/emulated_cuda/include/cuda_runtime_api.h"

struct cublasContext;
using cublasHandle_t = cublasContext*;

enum cublasStatus_t { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_NOT_INITIALIZED = 1, CUBLAS_STATUS_INVALID_VALUE = 7 };
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1 };
enum cublasMath_t { CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16 };
enum cudaDataType { CUDA_R_32F = 0, CUDA_R_16BF = 14 };

cublasStatus_t cublasCreate(cublasHandle_t* handle);
cublasStatus_t cublasDestroy(cublasHandle_t handle);
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream);
cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void* workspace, std::size_t bytes);
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode);
cublasStatus_t cublasGetVersion(cublasHandle_t handle, int* version);
const char* cublasGetStatusString(cublasStatus_t status);
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t a_operation,
                                          cublasOperation_t b_operation, int rows, int columns, int inner,
                                          const void* alpha, const void* a, cudaDataType a_type, int a_stride,
                                          long long a_step, const void* b, cudaDataType b_type, int b_stride,
                                          long long b_step, const void* beta, void* c, cudaDataType c_type,
                                          int c_stride, long long c_step, int batch, cublasComputeType_t compute,
                                          cublasGemmAlgo_t algorithm);
cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t a_operation, cublasOperation_t b_operation,
                            int rows, int columns, int inner, const void* alpha, const void* a, cudaDataType a_type,
                            int a_stride, const void* b, cudaDataType b_type, int b_stride, const void* beta, void* c,
                            cudaDataType c_type, int c_stride, cublasComputeType_t compute, cublasGemmAlgo_t algorithm);
