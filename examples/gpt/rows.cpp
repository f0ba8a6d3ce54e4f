#include "examples/gpt/rows.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "examples/gpt/layer_math.h"
#include "examples/gpt/number.h"

// Compiles a function for several instruction sets. The best one that the processor has is called.
// ThreadSanitizer would instrument the code that chooses one, which the loader runs before the sanitizer begins.
#ifdef __SANITIZE_THREAD__
#define BALLAST_FOR_EACH_ISA
#else
#define BALLAST_FOR_EACH_ISA [[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
#endif

namespace ballast::gpt::rows {
namespace {

// Sums have 16 lanes on every machine: as many as the widest vectors.
constexpr std::size_t lanes = 16;

template <class Join>
[[gnu::always_inline]] inline float fold(std::array<float, lanes>& lane, Join join) {
  for (std::size_t width = lanes / 2; width > 0; width /= 2) {
    for (std::size_t i = 0; i < width; ++i) {
      lane[i] = join(lane[i], lane[i + width]);
    }
  }
  return lane[0];
}

template <class Term>
[[gnu::always_inline]] inline float sum(std::size_t count, Term term) {
  std::array<float, lanes> lane{};
  const std::size_t whole = count / lanes * lanes;
  for (std::size_t i = 0; i < whole; i += lanes) {
    for (std::size_t j = 0; j < lanes; ++j) {
      lane[j] += term(i + j);
    }
  }
  for (std::size_t i = whole; i < count; ++i) {
    lane[i - whole] += term(i);
  }
  return fold(lane, [](float a, float b) { return a + b; });
}

[[gnu::always_inline]] inline float largest(const float* x, std::size_t count) {
  std::array<float, lanes> lane;
  lane.fill(x[0]);
  const std::size_t whole = count / lanes * lanes;
  for (std::size_t i = 0; i < whole; i += lanes) {
    for (std::size_t j = 0; j < lanes; ++j) {
      lane[j] = lane[j] > x[i + j] ? lane[j] : x[i + j];
    }
  }
  for (std::size_t i = whole; i < count; ++i) {
    lane[0] = lane[0] > x[i] ? lane[0] : x[i];
  }
  return fold(lane, [](float a, float b) { return a > b ? a : b; });
}

// Computes 2^n times a polynomial on +-ln(2)/2, to 2 ULP. Values that would overflow or vanish stay at the ends of the
// range. There are neither branches nor calls, so that loops over it are vectorised.
[[gnu::always_inline]] inline float exponential(float x) {
  constexpr float whole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
  const float above = x > -87.0f ? x : -87.0f;
  const float inside = above < 88.0f ? above : 88.0f;
  const float shifted = inside * 1.44269504f + whole;
  const float n = shifted - whole;
  const float r = (inside - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) + 127u) << 23);
}

[[gnu::always_inline]] inline float gelu_gate(float x) { return 1.0f / (1.0f + exponential(gelu_exponent(x))); }

BALLAST_FOR_EACH_ISA void widen(const bf16* from, Row to) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    to[i] = std::bit_cast<float>(std::uint32_t{from[i].bits} << 16);
  }
}

BALLAST_FOR_EACH_ISA void narrow(ConstRow from, bf16* to) {
  for (std::size_t i = 0; i < from.size(); ++i) {
    to[i].bits = static_cast<std::uint16_t>(kernels::to_bf16(from[i]));
  }
}

BALLAST_FOR_EACH_ISA void add_narrow(ConstRow more, bf16* to) {
  for (std::size_t i = 0; i < more.size(); ++i) {
    const float sum = std::bit_cast<float>(std::uint32_t{to[i].bits} << 16) + more[i];
    to[i].bits = static_cast<std::uint16_t>(kernels::to_bf16(sum));
  }
}

// Replaces values by the exponentials of their distance from the largest, and returns their sum.
BALLAST_FOR_EACH_ISA float exponentiate(Row x, float scale) {
  const float most = largest(x.data(), x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = exponential(scale * (x[i] - most));
  }
  return sum(x.size(), [=](std::size_t i) { return x[i]; });
}

BALLAST_FOR_EACH_ISA void multiply_by(Row x, float factor) {
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] *= factor;
  }
}

}  // namespace

void read(const ConstView& from, std::size_t first, Row to) {
  if (from.dtype() == DType::fp32) {
    std::copy_n(from.as<float>().data() + first, to.size(), to.data());
  } else {
    widen(from.as<bf16>().data() + first, to);
  }
}

void write(ConstRow from, const View& to, std::size_t first) {
  if (to.dtype() == DType::fp32) {
    std::copy_n(from.data(), from.size(), to.as<float>().data() + first);
  } else {
    narrow(from, to.as<bf16>().data() + first);
  }
}

void add_to(const View& to, std::size_t first, ConstRow more) {
  if (to.dtype() == DType::fp32) {
    add(to.as<float>().subspan(first, more.size()), more);
  } else {
    add_narrow(more, to.as<bf16>().data() + first);
  }
}

BALLAST_FOR_EACH_ISA void add(Row to, ConstRow more) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    to[i] += more[i];
  }
}

BALLAST_FOR_EACH_ISA void add_product(Row to, ConstRow factors, ConstRow rows) {
  for (std::size_t step = 0; step < factors.size(); ++step) {
    const float factor = factors[step];
    const float* const row = rows.data() + step * to.size();
    for (std::size_t i = 0; i < to.size(); ++i) {
      to[i] += factor * row[i];
    }
  }
}

BALLAST_FOR_EACH_ISA void gelu(ConstRow x, Row to) {
  for (std::size_t i = 0; i < x.size(); ++i) {
    to[i] = x[i] * gelu_gate(x[i]);
  }
}

BALLAST_FOR_EACH_ISA void gelu_backward(ConstRow x, Row gradient) {
  for (std::size_t i = 0; i < x.size(); ++i) {
    gradient[i] *= gelu_slope(x[i], gelu_gate(x[i]));
  }
}

BALLAST_FOR_EACH_ISA Moments moments(ConstRow x) {
  const auto divisor = static_cast<float>(x.size());
  const float mean = sum(x.size(), [=](std::size_t i) { return x[i]; }) / divisor;
  const float squares = sum(x.size(), [=](std::size_t i) { return (x[i] - mean) * (x[i] - mean); });
  return {mean, 1.0f / std::sqrt(squares / divisor + norm_epsilon)};
}

// The values that a loop reads are copied: what it writes could overwrite them otherwise, for all that the compiler knows.
BALLAST_FOR_EACH_ISA void normalise(const Normalised& row, ConstRow bias, Row to) {
  const auto [x, found, weight] = row;
  const auto [mean, per_deviation] = found;
  for (std::size_t i = 0; i < x.size(); ++i) {
    to[i] = (x[i] - mean) * per_deviation * weight[i] + bias[i];
  }
}

BALLAST_FOR_EACH_ISA void normalise_backward(const Normalised& row, ConstRow gradient, Row x_gradient,
                                             Row weight_gradient) {
  const ConstRow x = row.x, weight = row.weight;
  const float mean = row.moments.mean;
  const float per_deviation = row.moments.per_deviation;
  const auto slope = [=](std::size_t i) { return gradient[i] * weight[i]; };
  const auto normal = [=](std::size_t i) { return (x[i] - mean) * per_deviation; };
  const auto divisor = static_cast<float>(x.size());
  const float share = sum(x.size(), slope) / divisor;
  const float along = sum(x.size(), [=](std::size_t i) { return slope(i) * normal(i); }) / divisor;
  for (std::size_t i = 0; i < x.size(); ++i) {
    x_gradient[i] += per_deviation * (slope(i) - share - normal(i) * along);
    weight_gradient[i] += gradient[i] * normal(i);
  }
}

void softmax(Row x, float scale) {
  const float total = exponentiate(x, scale);
  multiply_by(x, 1.0f / total);
}

BALLAST_FOR_EACH_ISA void softmax_backward(ConstRow softmax, float scale, Row gradient) {
  const float along = sum(softmax.size(), [=](std::size_t i) { return softmax[i] * gradient[i]; });
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    gradient[i] = scale * softmax[i] * (gradient[i] - along);
  }
}

float cross_entropy(Row x, std::size_t target, float scale) {
  const float target_logit = x[target] - *std::ranges::max_element(x);
  const float total = exponentiate(x, 1.0f);
  multiply_by(x, scale / total);
  x[target] -= scale;
  return std::log(total) - target_logit;
}

}  // namespace ballast::gpt::rows
