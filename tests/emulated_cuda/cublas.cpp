// The emulated cuBLAS: products of matrices, on the stream's thread.
#include <atomic>
#include <bit>
#include <cstdint>

#include "tests/emulated_cuda/calls.h"
#include "tests/emulated_cuda/devices.h"
#include "tests/emulated_cuda/include/cublas_v2.h"
#include "tests/emulated_cuda/live.h"

struct cublasContext {
  int gpu = 0;
  cudaStream_t stream = nullptr;
};

namespace {

std::atomic<std::size_t> handles = 0;

struct Matrix {  // its elements lie by columns
  void* data;
  cudaDataType type;
  std::ptrdiff_t stride;
  bool transposed = false;

  std::ptrdiff_t place(std::ptrdiff_t row, std::ptrdiff_t column) const {
    return transposed ? row * stride + column : column * stride + row;
  }
  float get(std::ptrdiff_t row, std::ptrdiff_t column) const {
    const std::ptrdiff_t at = place(row, column);
    if (type == CUDA_R_32F) return static_cast<const float*>(data)[at];
    return std::bit_cast<float>(std::uint32_t{static_cast<const std::uint16_t*>(data)[at]} << 16);
  }
  void set(std::ptrdiff_t row, std::ptrdiff_t column, float value) const {
    const std::ptrdiff_t at = place(row, column);
    if (type == CUDA_R_32F) {
      static_cast<float*>(data)[at] = value;
      return;
    }
    const auto bits = std::bit_cast<std::uint32_t>(value);  // rounds to nearest, ties to even
    static_cast<std::uint16_t*>(data)[at] = static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
  }
  Matrix moved(std::ptrdiff_t elements) const {
    const std::ptrdiff_t width = type == CUDA_R_32F ? 4 : 2;
    return {static_cast<std::byte*>(data) + elements * width, type, stride, transposed};
  }
};

struct Sizes {
  std::ptrdiff_t rows, columns, inner;
};

struct Factors {
  float alpha, beta;
};

void multiply(const Sizes& sizes, const Factors& factors, const Matrix& a, const Matrix& b, const Matrix& to) {
  for (std::ptrdiff_t column = 0; column < sizes.columns; ++column) {
    for (std::ptrdiff_t row = 0; row < sizes.rows; ++row) {
      float sum = 0;
      for (std::ptrdiff_t i = 0; i < sizes.inner; ++i) {
        sum += a.get(row, i) * b.get(i, column);
      }
      sum *= factors.alpha;
      to.set(row, column, factors.beta == 0 ? sum : factors.beta * to.get(row, column) + sum);
    }
  }
}

struct Batch {  // matrices at the addresses that programs know
  const void* data;
  cudaDataType type;
  std::ptrdiff_t stride, step;
  int count;
};

struct Shape {
  std::ptrdiff_t rows, columns;
};

// The columns of the matrices; those that touch are one range.
void add_accesses(std::vector<emulated::Access>& to, const Batch& batch, const Shape& shape, bool writes) {
  const std::ptrdiff_t width = batch.type == CUDA_R_32F ? 4 : 2;
  for (int i = 0; i < batch.count; ++i) {
    for (std::ptrdiff_t column = 0; column < shape.columns; ++column) {
      const auto* const first =
          static_cast<const std::byte*>(batch.data) + (i * batch.step + column * batch.stride) * width;
      const auto bytes = static_cast<std::size_t>(shape.rows * width);
      const bool touches = column > 0 && static_cast<const std::byte*>(to.back().memory) + to.back().bytes == first;
      if (touches) to.back().bytes += bytes;
      if (!touches) to.push_back({first, bytes, writes});
    }
  }
}

cublasStatus_t begin(const char* name, emulated::Context context) {
  return emulated::end_call(emulated::begin_call(name, context)) == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                                                                : CUBLAS_STATUS_NOT_INITIALIZED;
}

}  // namespace

std::size_t emulated::live_cublas_handles() { return handles; }

cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  const cublasStatus_t status = begin("cublasCreate", emulated::Context::on_current);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  *handle = new cublasContext{.gpu = emulated::current_gpu()};
  ++handles;
  return status;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  const cublasStatus_t status = begin("cublasDestroy", emulated::Context::on_current);
  delete handle;
  --handles;
  return status;
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return begin("cublasSetStream", emulated::Context::none);
}

// Its memory is left alone: these products need none.
cublasStatus_t cublasSetWorkspace(cublasHandle_t, void*, std::size_t) {
  return begin("cublasSetWorkspace", emulated::Context::none);
}

// Sums are always in fp32.
cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) {
  return begin("cublasSetMathMode", emulated::Context::none);
}

cublasStatus_t cublasGetVersion(cublasHandle_t, int* version) {
  *version = 130100;
  return begin("cublasGetVersion", emulated::Context::none);
}

const char* cublasGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "success" : "the library was not initialized";
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t a_operation,
                                          cublasOperation_t b_operation, int rows, int columns, int inner,
                                          const void* alpha, const void* a, cudaDataType a_type, int a_stride,
                                          long long a_step, const void* b, cudaDataType b_type, int b_stride,
                                          long long b_step, const void* beta, void* c, cudaDataType c_type,
                                          int c_stride, long long c_step, int batch, cublasComputeType_t,
                                          cublasGemmAlgo_t) {
  const cublasStatus_t status = begin("cublasGemmStridedBatchedEx", emulated::Context::on_current);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const bool are_high_enough = a_stride >= (a_operation == CUBLAS_OP_N ? rows : inner) &&
                               b_stride >= (b_operation == CUBLAS_OP_N ? inner : columns) && c_stride >= rows;
  if (handle->gpu != emulated::current_gpu() || !are_high_enough) return CUBLAS_STATUS_INVALID_VALUE;
  emulated::use_kernel(reinterpret_cast<const void*>(&cublasGemmStridedBatchedEx));  // they are loaded together here
  using emulated::in_work;
  const Matrix first{in_work(const_cast<void*>(a)), a_type, a_stride, a_operation == CUBLAS_OP_T};
  const Matrix second{in_work(const_cast<void*>(b)), b_type, b_stride, b_operation == CUBLAS_OP_T};
  const Matrix to{in_work(c), c_type, c_stride};
  const Factors factors{*static_cast<const float*>(alpha), *static_cast<const float*>(beta)};
  const Batch all_a{a, a_type, a_stride, a_step, batch}, all_b{b, b_type, b_stride, b_step, batch},
      all_c{c, c_type, c_stride, c_step, batch};
  std::vector<emulated::Access> accesses;
  add_accesses(accesses, all_a, a_operation == CUBLAS_OP_N ? Shape{rows, inner} : Shape{inner, rows}, false);
  add_accesses(accesses, all_b, b_operation == CUBLAS_OP_N ? Shape{inner, columns} : Shape{columns, inner}, false);
  add_accesses(accesses, all_c, Shape{rows, columns}, true);
  emulated::stream_of(handle->stream).issue("a product of cuBLAS", std::move(accesses), [=] {
    for (int i = 0; i < batch; ++i) {
      multiply({rows, columns, inner}, factors, first.moved(i * a_step), second.moved(i * b_step),
               to.moved(i * c_step));
    }
  });
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t a_operation, cublasOperation_t b_operation,
                            int rows, int columns, int inner, const void* alpha, const void* a, cudaDataType a_type,
                            int a_stride, const void* b, cudaDataType b_type, int b_stride, const void* beta, void* c,
                            cudaDataType c_type, int c_stride, cublasComputeType_t compute,
                            cublasGemmAlgo_t algorithm) {
  return cublasGemmStridedBatchedEx(handle, a_operation, b_operation, rows, columns, inner, alpha, a, a_type, a_stride,
                                    0, b, b_type, b_stride, 0, beta, c, c_type, c_stride, 0, 1, compute, algorithm);
}
