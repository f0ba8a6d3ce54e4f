// The steps of an orthogonalization, for any device: which products in which order, and where their matrices lie.
#pragma once

#include "kernels/exact_sum_math.h"
#include "kernels/multiply.h"
#include "kernels/orthogonalize.h"

namespace ballast::kernels {

// The matrices that an orthogonalization keeps in its workspace, each as many as `count` of the shape.
struct NewtonSchulzMemory {
  std::uint16_t* other = nullptr;   // the other matrices, as many: a step reads the one and writes the other
  std::uint16_t* gram = nullptr;    // X X^T of the shorter side
  std::uint16_t* update = nullptr;  // b gram + c gram^2
  ExactSum* squares = nullptr;      // the squares of the norms
  std::byte* rest = nullptr;        // what the device adds
};

NewtonSchulzMemory newton_schulz_memory(const MatrixShape& shape, std::byte* workspace);
std::size_t newton_schulz_bytes(const MatrixShape& shape);  // the bytes of all members but `rest`

// What cuBLAS recommends for Hopper; older GPUs need less. Given by the caller, it is part of the planned memory, and the
// kernels that cuBLAS chooses do not depend on what its own pool has left.
inline constexpr std::size_t cublas_workspace_bytes = std::size_t{32} << 20;

// What a device does.
class MatrixWork {
 public:
  virtual ~MatrixWork() = default;

  // Computes to = from / its norm, of each matrix, also in place. `squares` is memory for one sum of each matrix.
  virtual void normalize(const std::uint16_t* from, const MatrixShape& shape, const NormBound& bound, ExactSum* squares,
                         std::uint16_t* to) = 0;
  virtual void multiply(const Product& product) = 0;
};

void newton_schulz(std::uint16_t* matrices, const MatrixShape& shape, const NewtonSchulz& how,
                   const NewtonSchulzMemory& memory, MatrixWork& work);

}  // namespace ballast::kernels
