// Formulas of the layers that CPUs and GPUs share. Each device has its own exponential.
#pragma once

namespace ballast::gpt {

// gelu(x) = x gate, with gate = 1 / (1 + exp(gelu_exponent(x))): the approximation by tanh.
[[gnu::always_inline]] constexpr float gelu_exponent(float x) {
  constexpr float twice_root = -2.0f * 0.797884561f;  // sqrt(2 / pi)
  return twice_root * (x + 0.044715f * x * x * x);
}

[[gnu::always_inline]] constexpr float gelu_slope(float x, float gate) {
  constexpr float twice_root = 2.0f * 0.797884561f;
  return gate + x * gate * (1.0f - gate) * twice_root * (1.0f + 3.0f * 0.044715f * x * x);
}

inline constexpr float norm_epsilon = 1e-5f;

}  // namespace ballast::gpt
