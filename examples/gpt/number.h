// Reads and writes one value of a view, in either format of the trainer.
#pragma once

#include <ballast/view.h>

#include "kernels/number_math.h"

namespace ballast::gpt {

inline float number(const ConstView& view, std::size_t i) {
  if (view.dtype() == DType::fp32) return reinterpret_cast<const float*>(view.data())[i];
  return kernels::from_bf16(std::uint32_t{reinterpret_cast<const std::uint16_t*>(view.data())[i]});
}

inline void set_number(const View& view, std::size_t i, float value) {
  if (view.dtype() == DType::fp32) {
    reinterpret_cast<float*>(view.data())[i] = value;
  } else {
    reinterpret_cast<std::uint16_t*>(view.data())[i] = static_cast<std::uint16_t>(kernels::to_bf16(value));
  }
}

}  // namespace ballast::gpt
