// Products of matrices in bf16 and Newton-Schulz iterations, on one thread, and the matrix library of the GPT trainer (oneDNN
// where it is installed) at the same products.
#pragma once

#include "benchmarks/harness/suite.h"
#include "kernels/orthogonalize.h"

namespace ballast::benchmarks {

// rows x inner x columns. A symmetric one is a matrix by its transpose, and counts the operations of both halves.
struct ProductSizes {
  std::size_t rows;
  std::size_t inner;
  std::size_t columns;
  bool symmetric = false;
};

Subject product(const ProductSizes& sizes);
Subject product_by_library(const ProductSizes& sizes, DType dtype);

// Five steps. By the library: their products alone, both halves of each.
Subject orthogonalization(const kernels::MatrixShape& shape);
Subject orthogonalization_by_library(const kernels::MatrixShape& shape);

}  // namespace ballast::benchmarks
