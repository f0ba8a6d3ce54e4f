// The formulas of the layers on a row of values, in fp32. Sums have one order, so every instruction set gives the same
// bits.
#pragma once

#include <ballast/view.h>

#include <cstddef>
#include <span>

namespace ballast::gpt::rows {

using Row = std::span<float>;
using ConstRow = std::span<const float>;

// Convert between fp32 and the format of a view, from its element `first` on. Values are rounded to nearest, ties to
// even.
void read(const ConstView& from, std::size_t first, Row to);
void write(ConstRow from, const View& to, std::size_t first);
void add_to(const View& to, std::size_t first, ConstRow more);  // sums in fp32 and rounds once

void add(Row to, ConstRow more);

// Adds the product of the factors, one for each row, and the rows, which lie one after the other. The factors come in their order,
// and products and sums are rounded separately.
void add_product(Row to, ConstRow factors, ConstRow rows);

void gelu(ConstRow x, Row to);
void gelu_backward(ConstRow x, Row gradient);  // gradient *= gelu'(x)

struct Moments {
  float mean;
  float per_deviation;  // 1 / sqrt(variance + norm_epsilon)
};
Moments moments(ConstRow x);

struct Normalised {
  ConstRow x;
  Moments moments;
  ConstRow weight;
};
void normalise(const Normalised& row, ConstRow bias, Row to);

// Adds to the gradients of x and of the weight.
void normalise_backward(const Normalised& row, ConstRow gradient, Row x_gradient, Row weight_gradient);

// Computes exp(scale x) / sum exp(scale x), in place.
void softmax(Row x, float scale);
// Turns the gradient of a softmax into that of its x, in place.
void softmax_backward(ConstRow softmax, float scale, Row gradient);

// Returns -log softmax(x)[target]. x becomes its gradient, times `scale`.
float cross_entropy(Row x, std::size_t target, float scale);

}  // namespace ballast::gpt::rows
