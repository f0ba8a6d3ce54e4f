// Measures how fast this machine multiplies matrices at best.
#pragma once

#include "examples/gpt/maths.h"

namespace ballast::gpt {

// Operations a second: the fastest of square products of a few sizes in this format.
double measure_matrix_rate(Maths& maths, DType dtype);

}  // namespace ballast::gpt
