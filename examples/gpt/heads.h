// The positions of attention heads in memory.
#pragma once

#include "examples/gpt/maths.h"

namespace ballast::gpt {

// A head's columns in the rows of one sequence.
template <class AnyMatrix>
struct HeadOf {
  AnyMatrix query;
  AnyMatrix key;
  AnyMatrix value;
};

// `number` counts the heads of all sequences.
template <class AnyView>
auto head_of(const AttentionShape& shape, const AnyView& qkv, std::size_t number) {
  const auto all = matrix(qkv, 3 * shape.width());
  const std::size_t row = number / shape.heads * shape.context;
  const std::size_t column = number % shape.heads * shape.head_width;
  const auto third = [&](std::size_t which) {
    return all.part(row, shape.context, which * shape.width() + column, shape.head_width);
  };
  return HeadOf<decltype(third(0))>{third(0), third(1), third(2)};
}

template <class AnyView>
auto output_of_head(const AttentionShape& shape, const AnyView& output, std::size_t number) {
  return matrix(output, shape.width())
      .part(number / shape.heads * shape.context, shape.context, number % shape.heads * shape.head_width,
            shape.head_width);
}

}  // namespace ballast::gpt
