// The layout of quantized values, and their rounding. quantize_math.h defines their formulas.
#pragma once

#include <ballast/view.h>

#include <algorithm>
#include <span>

#include "kernels/quantize_math.h"
#include "kernels/runtime/sizes.h"

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

// The distance between the codes of ranks, of `count` elements each. NCCL moves single bytes from and to addresses that are no
// multiples of 16.
constexpr std::size_t code_alignment = 16;
constexpr std::size_t encoded_part_bytes(std::size_t count, CodeBits bits) {
  return round_up(quantized_bytes(count, bits), code_alignment);
}

// Return the memory that a rank encodes in. A gather and a reduce_scatter need codes of `count` elements for each rank. An
// all_reduce of `count` elements needs codes of each rank's part, first of the values and then of the sums.
constexpr std::size_t encoded_parts_bytes(std::size_t count, std::size_t ranks, CodeBits bits) {
  return ranks * encoded_part_bytes(count, bits);
}
constexpr std::size_t encoded_all_reduce_bytes(std::size_t count, std::size_t ranks, CodeBits values, CodeBits sums) {
  const std::size_t part = part_of_groups(count, ranks);
  return std::max(encoded_parts_bytes(part, ranks, values), encoded_parts_bytes(part, ranks, sums));
}

// `blocks` holds quantized_bytes() of u8, at a multiple of 4 bytes.
template <class AnyView>
struct BasicQuantized {
  CodeBits bits = CodeBits::eight;
  AnyView blocks;
};
using Quantized = BasicQuantized<View>;
using ConstQuantized = BasicQuantized<ConstView>;

}  // namespace ballast::kernels
