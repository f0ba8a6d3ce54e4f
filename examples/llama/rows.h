// Formulas of the layers on a row of values, on CPUs, in fp32. Sums have one order, so every instruction set gives the same bits.
#pragma once

#include <ballast/view.h>

#include <span>

namespace ballast::llama::rows {

using Row = std::span<float>;
using ConstRow = std::span<const float>;

// Between fp32 and the format of a view, from its element `first` on. Values are rounded to nearest, ties to even.
void read(const ConstView& from, std::size_t first, Row to);
void write(ConstRow from, const View& to, std::size_t first);
void add_to(const View& to, std::size_t first, ConstRow more);  // sums in fp32 and rounds once

void add(Row to, ConstRow more);
float dot(ConstRow a, ConstRow b);

void scale_by(Row x, float factor, ConstRow weight);  // x *= factor * weight
// Adds to the gradients of x, whose root mean square is 1 / factor, and of the weight.
void rms_norm_backward(ConstRow x, ConstRow weight, float factor, ConstRow gradient, Row weight_gradient,
                       Row x_gradient);

void rotate(Row low, Row high, ConstRow cosines, ConstRow sines, float sign);

void swiglu(ConstRow gate, ConstRow up, Row to);
void swiglu_backward(ConstRow gate, ConstRow up, Row gradient, Row up_gradient);

// Replaces x by exp(scale x - offset).
void exponentiate(Row x, float scale, float offset);
// Replaces x by exp(scale x) / sum exp(scale x), and returns the logarithm of that sum.
float softmax(Row x, float scale);
// Turns the gradient of a softmax into that of its x, in place. `along` is the sum of their products.
void softmax_backward(ConstRow softmax, float scale, float along, Row gradient);

}  // namespace ballast::llama::rows
