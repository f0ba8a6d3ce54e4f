#include "examples/llama/rows.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

// Compiles a function for several instruction sets. The best one that the processor has is called.
// ThreadSanitizer would instrument the code that chooses one, which the loader runs before the sanitizer begins.
#if defined(__SANITIZE_THREAD__) || !defined(__x86_64__)
#define BALLAST_FOR_EACH_ISA
#else
#define BALLAST_FOR_EACH_ISA [[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
#endif

namespace ballast::llama::rows {
namespace {

// Sums have 16 lanes on every machine: as many as the widest vectors.
constexpr std::size_t lanes = 16;

template <class Term, class Join>
[[gnu::always_inline]] inline float reduce(std::size_t count, float begin, Term term, Join join) {
  std::array<float, lanes> lane;
  lane.fill(begin);
  const std::size_t whole = count / lanes * lanes;
  for (std::size_t i = 0; i < whole; i += lanes) {
    for (std::size_t j = 0; j < lanes; ++j)
      lane[j] = join(lane[j], term(i + j));
  }
  for (std::size_t i = whole; i < count; ++i)
    lane[i - whole] = join(lane[i - whole], term(i));
  for (std::size_t width = lanes / 2; width > 0; width /= 2) {
    for (std::size_t i = 0; i < width; ++i)
      lane[i] = join(lane[i], lane[i + width]);
  }
  return lane[0];
}

template <class Term>
[[gnu::always_inline]] inline float sum(std::size_t count, Term term) {
  return reduce(count, 0.0f, term, [](float a, float b) { return a + b; });
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

[[gnu::always_inline]] inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

[[gnu::always_inline]] inline float widen(bf16 value) { return std::bit_cast<float>(std::uint32_t{value.bits} << 16); }

[[gnu::always_inline]] inline bf16 narrow(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<std::uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded)};
}

BALLAST_FOR_EACH_ISA void widen(const bf16* from, Row to) {
  for (std::size_t i = 0; i < to.size(); ++i)
    to[i] = widen(from[i]);
}

BALLAST_FOR_EACH_ISA void narrow(ConstRow from, bf16* to) {
  for (std::size_t i = 0; i < from.size(); ++i)
    to[i] = narrow(from[i]);
}

BALLAST_FOR_EACH_ISA void add_narrow(ConstRow more, bf16* to) {
  for (std::size_t i = 0; i < more.size(); ++i)
    to[i] = narrow(widen(to[i]) + more[i]);
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
  for (std::size_t i = 0; i < to.size(); ++i)
    to[i] += more[i];
}

BALLAST_FOR_EACH_ISA float dot(ConstRow a, ConstRow b) {
  return sum(a.size(), [=](std::size_t i) { return a[i] * b[i]; });
}

BALLAST_FOR_EACH_ISA void scale_by(Row x, float factor, ConstRow weight) {
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = x[i] * factor * weight[i];
}

BALLAST_FOR_EACH_ISA void rms_norm_backward(ConstRow x, ConstRow weight, float factor, ConstRow gradient,
                                            Row weight_gradient, Row x_gradient) {
  const float along = sum(x.size(), [=](std::size_t i) { return gradient[i] * weight[i] * x[i]; });
  const float share = along * factor * factor / static_cast<float>(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    x_gradient[i] += factor * (gradient[i] * weight[i] - share * x[i]);
    weight_gradient[i] += gradient[i] * x[i] * factor;
  }
}

BALLAST_FOR_EACH_ISA void rotate(Row low, Row high, ConstRow cosines, ConstRow sines, float sign) {
  for (std::size_t i = 0; i < low.size(); ++i) {
    const float a = low[i], b = high[i], sine = sign * sines[i];
    low[i] = a * cosines[i] - b * sine;
    high[i] = b * cosines[i] + a * sine;
  }
}

BALLAST_FOR_EACH_ISA void swiglu(ConstRow gate, ConstRow up, Row to) {
  for (std::size_t i = 0; i < to.size(); ++i)
    to[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

BALLAST_FOR_EACH_ISA void swiglu_backward(ConstRow gate, ConstRow up, Row gradient, Row up_gradient) {
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const float open = sigmoid(gate[i]), slope = open + gate[i] * open * (1.0f - open);
    up_gradient[i] = gradient[i] * gate[i] * open;
    gradient[i] *= up[i] * slope;
  }
}

BALLAST_FOR_EACH_ISA void exponentiate(Row x, float scale, float offset) {
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = exponential(scale * x[i] - offset);
}

BALLAST_FOR_EACH_ISA float softmax(Row x, float scale) {
  const auto larger = [](float a, float b) { return a > b ? a : b; };
  const float most = scale * reduce(
                                 x.size(), x[0], [=](std::size_t i) { return x[i]; }, larger);
  exponentiate(x, scale, most);
  const float total = sum(x.size(), [=](std::size_t i) { return x[i]; }), factor = 1.0f / total;
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] *= factor;
  return most + std::log(total);
}

BALLAST_FOR_EACH_ISA void softmax_backward(ConstRow softmax, float scale, float along, Row gradient) {
  for (std::size_t i = 0; i < gradient.size(); ++i)
    gradient[i] = scale * softmax[i] * (gradient[i] - along);
}

}  // namespace ballast::llama::rows
