// The format of gradients that are summed over the ranks and kept until the update.
#pragma once

#include <ballast/view.h>

#include <cstdint>
#include <string_view>

namespace ballast {

// See docs/concepts/state-formats.md. With bf16, the sum over the ranks of one backward use is rounded once, to nearest;
// later uses of a step are added with stochastic rounding.
enum class GradientFormat : std::uint8_t { fp32, bf16 };

constexpr std::string_view name(GradientFormat format) {
  constexpr std::string_view names[] = {"fp32", "bf16"};
  return names[static_cast<std::size_t>(format)];
}

// The format applies to parameters in bf16. Gradients of fp32 and fp16 parameters would lose bits, and are kept in fp32.
constexpr DType dtype_of_sums(GradientFormat format, DType parameter) {
  return format == GradientFormat::bf16 && parameter == DType::bf16 ? DType::bf16 : DType::fp32;
}

}  // namespace ballast
