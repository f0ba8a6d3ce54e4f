// The kernels around the optimizer step, from memory, with all threads: those that move, sum, check and pack values.
#pragma once

#include "benchmarks/harness/suite.h"
#include "kernels/backend.h"

namespace ballast::benchmarks {

Subject cast(DType from, DType to, const Setting& setting);
Subject accumulate(DType from, DType into, const Setting& setting);
Subject fill(DType dtype, const Setting& setting);

// Copies `pieces` pieces of different sizes from one stretch of memory to another in one call.
Subject pack(std::size_t pieces, const Setting& setting);

Subject sum_of_squares(DType dtype, const Setting& setting);
Subject first_non_finite(DType dtype, const Setting& setting);

Subject quantize(DType from, kernels::CodeBits bits, const Setting& setting);
Subject dequantize(kernels::CodeBits bits, DType to, const Setting& setting);

}  // namespace ballast::benchmarks
