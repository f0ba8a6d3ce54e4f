// The kernels that the suite measures beside the elementwise ones: AdamW, and products of matrices.
#pragma once

#include "benchmarks/harness/suite.h"
#include "kernels/backend.h"
#include "kernels/orthogonalize.h"

namespace ballast::benchmarks {

// --- AdamW as bf16 training uses it: bf16 gradients in, bf16 parameters out, the state of one format rewritten ---

// Reads and writes memory, with all threads.
Subject adamw(StateFormat format, const Setting& setting);

// Has a power of two of elements, so that gradient, parameter, master and moments lie at distances that are powers of
// two. A memory controller may then send them all to the same bank.
Subject adamw_power_of_two(StateFormat format, const Setting& setting);

// Works in tiles, as the engine updates: each has its state in one stretch of memory.
Subject adamw_tiles(StateFormat format, const Setting& setting);

// Does the same arithmetic on as many elements, but each thread stays in its cache: the rate if memory cost nothing.
Subject adamw_from_cache(StateFormat format, const Setting& setting);

// --- Products of matrices in bf16 and Newton-Schulz iterations, on one thread, and the matrix library of the GPT trainer (oneDNN
// where it is installed) at the same products ---

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
