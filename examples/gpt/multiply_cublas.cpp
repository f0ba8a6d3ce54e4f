#include "examples/gpt/multiply_cublas.h"

#include <cublas_v2.h>
#include <fmt/format.h>

#include "kernels/runtime/current_gpu.h"

namespace ballast::gpt {
namespace {

void check(cublasStatus_t status, std::string_view what) {
  require(status == CUBLAS_STATUS_SUCCESS, Code::cuda_call,
          [&] { return Problem{.what = fmt::format("{} failed: {}", what, cublasGetStatusString(status))}; });
}

cudaDataType type_of(DType dtype) { return dtype == DType::fp32 ? CUDA_R_32F : CUDA_R_16BF; }

cublasOperation_t direction(const ConstMatrix& matrix) { return matrix.transposed ? CUBLAS_OP_T : CUBLAS_OP_N; }

int whole(std::size_t count) {
  require(count <= INT32_MAX, Code::wrong_size, [&] {
    return Problem{.what = "cannot multiply with cuBLAS: a matrix is too large",
                   .needed = fmt::format("{} rows or columns", count),
                   .available = std::to_string(INT32_MAX)};
  });
  return static_cast<int>(count);
}

long long step(std::size_t elements) { return static_cast<long long>(elements); }

}  // namespace

struct CublasMultiplier::Handle {
  explicit Handle(int of) : gpu(of) {}
  ~Handle() {
    const CurrentGpu current(gpu, std::nothrow);
    if (cublas != nullptr) cublasDestroy(cublas);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  const int gpu;
  cublasHandle_t cublas = nullptr;
};

CublasMultiplier::CublasMultiplier(StreamHandle stream, int gpu) : handle_(std::make_unique<Handle>(gpu)) {
  device::require_gpu(gpu);
  const CurrentGpu current(gpu);
  check(cublasCreate(&handle_->cublas), "starting cuBLAS");
  check(cublasSetStream(handle_->cublas, stream), "giving cuBLAS a stream");
}

CublasMultiplier::~CublasMultiplier() = default;

std::string CublasMultiplier::library() const {
  int version = 0;
  check(cublasGetVersion(handle_->cublas, &version), "asking for cuBLAS's version");
  return fmt::format("cuBLAS {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

// cuBLAS stores matrices by columns. Ours are by rows, so they are its transposes: it computes to^T = b^T a^T.
void CublasMultiplier::operator()(const Product& product, const Steps& steps) const {
  const auto& [a, b, to, bias, add] = product;
  const CurrentGpu current(handle_->gpu);
  const float one = 1.0f, begin = add ? 1.0f : 0.0f;
  check(cublasGemmStridedBatchedEx(handle_->cublas, direction(b), direction(a), whole(to.columns), whole(to.rows),
                                   whole(a.columns), &one, b.data(), type_of(b.dtype()), whole(b.stride), step(steps.b),
                                   a.data(), type_of(a.dtype()), whole(a.stride), step(steps.a), &begin, to.data(),
                                   type_of(to.dtype()), whole(to.stride), step(steps.to), whole(steps.count),
                                   CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "a product of matrices by cuBLAS");
}

}  // namespace ballast::gpt
