// Measures the highest rate at which this machine multiplies matrices.
#pragma once

#include "examples/gpt/maths.h"

namespace ballast::gpt {

// Returns operations a second: the fastest of square products of a few sizes in this format.
double measure_matrix_rate(Maths& maths, DType dtype);

}  // namespace ballast::gpt
