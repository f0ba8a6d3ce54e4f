// The layout of quantized values, and their rounding. quantize_math.h defines their formulas.
#pragma once

#include <ballast/view.h>

#include <span>

#include "kernels/quantize_pieces.h"

namespace ballast::kernels {

constexpr std::size_t block_count(std::size_t count) { return count / group_size + (count % group_size != 0 ? 1 : 0); }

// The size of `count` quantized values.
constexpr std::size_t quantized_bytes(std::size_t count, CodeBits bits) {
  return block_count(count) * block_bytes(bits);
}

// The elements of each of `parts` equal parts of whole groups. The last parts may be short, or empty.
constexpr std::size_t part_of_groups(std::size_t count, std::size_t parts) {
  return (block_count(count) + parts - 1) / parts * group_size;
}

// `blocks` holds quantized_bytes() of u8, at a multiple of 4 bytes.
template <class AnyView>
struct BasicQuantized {
  CodeBits bits = CodeBits::eight;
  AnyView blocks;
};
using Quantized = BasicQuantized<View>;
using ConstQuantized = BasicQuantized<ConstView>;

// These throw a UsageError for wrong arguments. Every backend calls them first.
void check_quantize(const ConstView& from, const Quantized& to, const CodeRounding& rounding);
void check_dequantize(const ConstQuantized& from, const View& to);
void check_sum_quantized(std::span<const ConstView> from, CodeBits bits, const View& into);

}  // namespace ballast::kernels
