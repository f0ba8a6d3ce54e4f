// A product of bf16 factors with fp32 arithmetic: for processors without bf16 arithmetic.
#pragma once

#include "examples/gpt/multiply.h"

namespace ballast::gpt {

void multiply_widened(const Product& product, const Multiplier& multiply);

}  // namespace ballast::gpt
