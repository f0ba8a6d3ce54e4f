// The shape of matrices that are orthogonalized, and what follows from it before there is any memory: see orthogonalize.h.
#pragma once

#include <cstddef>

namespace ballast::kernels {

// Matrices of one shape that lie one after the other, each stored by rows, in bf16. A matrix whose heads are orthogonalized
// apart is as many matrices of fewer rows.
struct MatrixShape {
  std::size_t rows = 0;
  std::size_t columns = 0;
  std::size_t count = 1;

  std::size_t elements() const { return rows * columns * count; }
};

// The additions and multiplications of one step of an orthogonalization.
double operations_of_step(const MatrixShape& shape);

// The bytes that an orthogonalization works in. A thread of a CPU has half a MiB more of its own.
std::size_t workspace_bytes(const MatrixShape& shape, bool on_gpu);

}  // namespace ballast::kernels
