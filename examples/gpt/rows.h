// The formulas of the layers on a row of values, in fp32. Sums have one order, so every instruction set gives the same
// bits.
#pragma once

#include <ballast/view.h>

#include <cstddef>
#include <span>

// Compiles a function for several instruction sets. The best one that the processor has is called.
// ThreadSanitizer would instrument the code that chooses one, which the loader runs before the sanitizer begins.
#ifdef __SANITIZE_THREAD__
#define BALLAST_FOR_EACH_ISA
#else
#define BALLAST_FOR_EACH_ISA [[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
#endif

namespace ballast::gpt::rows {

using Row = std::span<float>;
using ConstRow = std::span<const float>;

// Convert between fp32 and the format of a view, from its element `first` on. Values are rounded to nearest, ties to
// even.
void read(const ConstView& from, std::size_t first, Row to);
void write(ConstRow from, const View& to, std::size_t first);
void add_to(const View& to, std::size_t first, ConstRow more);  // sums in fp32 and rounds once

void add(Row to, ConstRow more);

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
