// The layout of quantized values, and their rounding. quantize_math.h defines their formulas.
#pragma once

#include <ballast/view.h>

#include "kernels/quantize_math.h"
#include "kernels/state_math.h"

namespace ballast::kernels {

// The size of `count` quantized values. The codes of a group of elements take group_size bytes, or half of that.
constexpr std::size_t code_bytes(std::size_t count, CodeBits bits) {
  return bits == CodeBits::eight ? count : count / 2 + count % 2;
}
constexpr std::size_t scale_count(std::size_t count) { return count / group_size + (count % group_size != 0 ? 1 : 0); }

// `codes` holds code_bytes() of u8, `scales` scale_count() of fp32. An unused half of the last byte is zero.
template <class AnyView>
struct BasicQuantized {
  CodeBits bits = CodeBits::eight;
  AnyView codes;
  AnyView scales;
};
using Quantized = BasicQuantized<View>;
using ConstQuantized = BasicQuantized<ConstView>;

// These throw a UsageError for wrong arguments. Every backend calls them first.
void check_quantize(const ConstView& from, const Quantized& to, const CodeRounding& rounding);
void check_dequantize(const ConstQuantized& from, const View& to);

}  // namespace ballast::kernels
