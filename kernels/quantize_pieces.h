// Quantized values in memory, as the walks take them: blocks, one for each group of elements. They are plain structs, see
// numbers.h.
#pragma once

#include "kernels/numbers.h"
#include "kernels/quantize_math.h"
#include "kernels/state_math.h"

namespace ballast::kernels {

// A block is the group's scale, in fp32, and then its codes. Codes of 4 bits lie two in a byte, the first in the lower half. A
// last, incomplete group has a block of full size; its codes past the last element are zero.
inline constexpr std::size_t scale_bytes = sizeof(float);
constexpr std::size_t group_code_bytes(CodeBits bits) { return bits == CodeBits::eight ? group_size : group_size / 2; }
constexpr std::size_t block_bytes(CodeBits bits) { return scale_bytes + group_code_bytes(bits); }

// Blocks begin at a multiple of 4 bytes.
struct QuantizedPiece {
  CodeBits bits = CodeBits::eight;
  std::byte* blocks = nullptr;
};
struct ConstQuantizedPiece {
  CodeBits bits = CodeBits::eight;
  const std::byte* blocks = nullptr;
};

// Quantized arrays that are added element by element, in order. `arrays.count` counts elements.
struct QuantizedSummands {
  Summands arrays{};
  CodeBits bits = CodeBits::eight;
};

}  // namespace ballast::kernels
