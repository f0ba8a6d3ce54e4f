// Orthogonalizes matrices, as torch.optim.Muon does: from U S V^T to nearly U V^T, by products of matrices alone (Newton-Schulz
// iterations).
//
// The bits depend on the matrices, their shape and the steps. On CPUs they do not depend on the instruction set, on threads and
// on the other matrices of a call. CPUs and GPUs add up products in different orders: their results differ by what rounding to
// bf16 makes of that (tests/kernels/orthogonalize_test.cpp).
#pragma once

#include <ballast/view.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "kernels/matrix_shape.h"
#include "kernels/multiply.h"

namespace ballast::kernels {

// One step of the iteration: each singular value s becomes a s + b s^3 + c s^5.
struct Quintic {
  float a = 0.0f;
  float b = 0.0f;
  float c = 0.0f;
};

struct NewtonSchulz {
  std::vector<Quintic> steps;
  float norm_factor = 1.0f;  // matrices are first divided by their Frobenius norm times this
  float eps = 1e-7f;         // the least divisor
};

// Not for several threads at once. Memory and order: as Backend.
class Orthogonalizer {
 public:
  virtual ~Orthogonalizer() = default;
  virtual std::size_t workspace_bytes(const MatrixShape& shape) const = 0;

  // Orthogonalizes in place. The workspace has at least workspace_bytes() bytes, at a multiple of workspace_alignment.
  void operator()(const View& matrices, const MatrixShape& shape, const NewtonSchulz& how, const View& workspace);

 private:
  // What a device does. `rest` is the workspace beyond that of the matrices.
  virtual void begin(std::byte* /*rest*/) {}
  // Computes to = from / its norm, of each matrix, also in place. `squares` is memory for one sum of each matrix.
  virtual void normalize(const std::uint16_t* from, const MatrixShape& shape, const NormBound& bound, ExactSum* squares,
                         std::uint16_t* to) = 0;
  virtual void multiply(const Product& product) = 0;

  void run(std::uint16_t* matrices, const MatrixShape& shape, const NewtonSchulz& how, std::byte* workspace);
};

inline constexpr std::size_t workspace_alignment = 256;

// What cuBLAS recommends for Hopper; older GPUs need less. Given by the caller, it is part of the planned memory, and the
// kernels that cuBLAS chooses do not depend on what its own pool has left.
inline constexpr std::size_t cublas_workspace_bytes = std::size_t{32} << 20;

std::unique_ptr<Orthogonalizer> cpu_orthogonalizer(CpuOptions options = {});

// Throws B2101 in builds without CUDA, B2102 if there is no such GPU, and B2103 if cuBLAS cannot be loaded. The caller owns the
// stream (null: the default stream), which outlives the orthogonalizer. Made before communicators of NCCL, because it loads cuBLAS.
std::unique_ptr<Orthogonalizer> cuda_orthogonalizer(StreamHandle stream, int gpu = 0);

}  // namespace ballast::kernels
