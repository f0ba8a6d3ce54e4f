// Fills the table of walks for lanes S. The source of each instruction set includes this file and is compiled for that
// set.
#pragma once

#include "kernels/array_walk.h"
#include "kernels/multiply_walk.h"
#include "kernels/quantize_walk.h"
#include "kernels/update_walk.h"
#include "kernels/walks.h"

namespace ballast::kernels {

template <class S>
constexpr Walks walks_of() {
  return {.update = &update_run<S>,
          .cast = &cast_walk<S>,
          .sum = &sum_walk<S>,
          .accumulate_stochastic = &accumulate_stochastic_walk<S>,
          .sum_of_squares = &sum_of_squares_walk<S>,
          .first_non_finite = &first_non_finite_walk<S>,
          .quantize = &quantize_walk<S>,
          .dequantize = &dequantize_walk<S>,
          .sum_quantized = &sum_quantized_walk<S>,
          .multiply_block = &multiply_block<S, WidenedFactors<S>>,
          .divide = &divide_walk<S>};
}

}  // namespace ballast::kernels
