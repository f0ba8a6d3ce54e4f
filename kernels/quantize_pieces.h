// Quantized values in memory, as the walks take them. They are plain structs, see numbers.h.
#pragma once

#include "kernels/quantize_math.h"

namespace ballast::kernels {

// A piece of quantized values that begins at a group.
struct QuantizedPiece {
  CodeBits bits = CodeBits::eight;
  std::uint8_t* codes = nullptr;
  float* scales = nullptr;
};
struct ConstQuantizedPiece {
  CodeBits bits = CodeBits::eight;
  const std::uint8_t* codes = nullptr;
  const float* scales = nullptr;
};

}  // namespace ballast::kernels
