#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>

#include "kernels/cublas.h"
#include "kernels/cuda.h"
#include "kernels/orthogonalize.h"
#include "kernels/runtime/buffer.h"
#include "kernels/runtime/device.h"

namespace ballast::kernels {
namespace {

void check(cublasStatus_t status, std::string_view what) {
  require(status == CUBLAS_STATUS_SUCCESS, Code::cuda_call,
          [&] { return Problem{.what = fmt::format("{} failed: {}", what, cublas().status_string(status))}; });
}

int whole(std::size_t count) {
  require(count <= INT32_MAX, Code::wrong_size, [&] {
    return Problem{.what = "cannot multiply with cuBLAS: a matrix is too large",
                   .needed = fmt::format("{} rows or columns", count),
                   .available = std::to_string(INT32_MAX)};
  });
  return static_cast<int>(count);
}

// cuBLAS stores matrices by columns, so it reads a factor that is stored by rows as its transpose.
cublasOperation_t operation(const Factor& factor) { return factor.column_step == 1 ? CUBLAS_OP_N : CUBLAS_OP_T; }

// The distance of the columns that cuBLAS reads. It refuses one that is less than their height, as the step of a factor with one
// row or one column may be.
int stride(const Factor& factor, std::size_t rows, std::size_t columns) {
  return whole(factor.column_step == 1 ? std::max(factor.row_step, columns) : std::max(factor.column_step, rows));
}

class CudaOrthogonalizer : public Orthogonalizer {
 public:
  explicit CudaOrthogonalizer(const Cuda& cuda) : cuda_(cuda) {
    const CurrentGpu current(cuda_.gpu);
    check(cublas().create(&handle_), "starting cuBLAS");
  }
  ~CudaOrthogonalizer() override {
    const CurrentGpu current(cuda_.gpu, std::nothrow);
    cublas().destroy(handle_);
  }
  CudaOrthogonalizer(const CudaOrthogonalizer&) = delete;
  CudaOrthogonalizer& operator=(const CudaOrthogonalizer&) = delete;

  // The first product makes CUDA load cuBLAS, which may synchronize the GPU. Later, beside a collective of NCCL, that could be a
  // deadlock between ranks.
  void load() {
    constexpr std::size_t side = 16;
    MemoryAccounts accounts;
    const Buffer memory = allocate(accounts, {.kind = MemoryKind::device,
                                              .bytes = 2 * side * side * sizeof(std::uint16_t),
                                              .owner = "loading cuBLAS",
                                              .gpu = cuda_.gpu});
    auto* const from = reinterpret_cast<std::uint16_t*>(memory.data());
    device::fill(from, 0, memory.bytes(), cuda_.stream);
    check(cublas().set_stream(handle_, cuda_.stream), "giving cuBLAS a stream");
    const Factor factor{from, side};
    multiply({.rows = side, .inner = side, .columns = side, .left = factor, .right = factor, .to = from + side * side});
    device::synchronize(cuda_.stream);
  }

  std::size_t workspace_bytes(const MatrixShape& shape) const override { return kernels::workspace_bytes(shape, true); }

 private:
  void begin(std::byte* rest) override {
    const CurrentGpu current(cuda_.gpu);
    check(cublas().set_stream(handle_, cuda_.stream), "giving cuBLAS a stream");  // takes its workspace away
    check(cublas().set_workspace(handle_, rest, cublas_workspace_bytes), "giving cuBLAS a workspace");
    // Else parts of a sum may be added up in bf16.
    check(cublas().set_math_mode(handle_, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION),
          "asking cuBLAS for sums in fp32");
  }

  void normalize(const std::uint16_t* from, const MatrixShape& shape, const NormBound& bound, ExactSum* squares,
                 std::uint16_t* to) override {
    const CurrentGpu current(cuda_.gpu);
    device::fill(squares, 0, shape.count * sizeof(ExactSum), cuda_.stream);
    const std::size_t elements = shape.rows * shape.columns;
    for (std::size_t i = 0; i < shape.count; ++i, from += elements, to += elements) {
      const ConstNumbers matrix{reinterpret_cast<const std::byte*>(from), elements, DType::bf16};
      sum_of_squares(cuda_, matrix, &squares[i]);
      kernels::normalize(cuda_, matrix, &squares[i], bound, {reinterpret_cast<std::byte*>(to), elements, DType::bf16});
    }
  }

  // It computes the transposes: to^T = right^T left^T.
  void multiply(const Product& product) override {
    const CurrentGpu current(cuda_.gpu);
    const auto& [rows, inner, columns, count, left, right, to, added, alpha, beta, symmetric] = product;
    if (beta != 0.0f) device::copy(to, added, rows * columns * count * sizeof *to, cuda_.stream);
    const auto step = [](auto height, auto width) {
      return static_cast<long long>(height) * static_cast<long long>(width);
    };
    check(
        cublas().multiply(handle_, operation(right), operation(left), whole(columns), whole(rows), whole(inner), &alpha,
                          right.data, CUDA_R_16BF, stride(right, inner, columns), step(inner, columns), left.data,
                          CUDA_R_16BF, stride(left, rows, inner), step(rows, inner), &beta, to, CUDA_R_16BF,
                          whole(columns), step(rows, columns), whole(count), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "a product of matrices by cuBLAS");
  }

  Cuda cuda_;
  cublasHandle_t handle_ = nullptr;
};

}  // namespace

std::unique_ptr<Orthogonalizer> cuda_orthogonalizer(StreamHandle stream, int gpu) {
  device::require_gpu(gpu);
  auto made = std::make_unique<CudaOrthogonalizer>(cuda_on(stream, gpu));
  made->load();
  return made;
}

}  // namespace ballast::kernels
