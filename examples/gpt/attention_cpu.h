// Causal attention of one head of one sequence, on one CPU thread. It takes a block of queries at a time, with the keys
// up to that block's end.
#pragma once

#include "examples/gpt/heads.h"
#include "examples/gpt/multiply.h"

namespace ballast::gpt {

void attend(const Multiplier& multiply, const HeadOf<ConstMatrix>& head, const Matrix& to);
void attend_backward(const Multiplier& multiply, const HeadOf<ConstMatrix>& head, const ConstMatrix& gradient,
                     const HeadOf<Matrix>& to);

}  // namespace ballast::gpt
