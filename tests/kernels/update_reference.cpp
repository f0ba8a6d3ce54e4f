#include "tests/kernels/update_reference.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace ballast::kernels {
namespace {

template <class T>
T read(const std::byte* array, std::size_t i) {
  T value;
  std::memcpy(&value, array + i * sizeof(T), sizeof(T));
  return value;
}

double number(const std::byte* array, DType dtype, std::size_t i) {
  if (dtype == DType::fp32) return double{read<float>(array, i)};
  const auto half = read<std::uint16_t>(array, i);
  return dtype == DType::bf16 ? bf16_value(half) : fp16_value(half);
}

// The parameter and the bits below it make an integer: the pattern of the fp32 master.
double joined(std::uint16_t parameter, int remainder) {
  const std::int64_t pattern = std::int64_t{parameter} * 65536 + remainder;
  return double{std::bit_cast<float>(static_cast<std::uint32_t>(pattern))};
}

double master_of(const TileMemory& tile, std::size_t i) {
  if (tile.parameter_dtype == DType::fp32) return number(tile.parameter, DType::fp32, i);
  switch (tile.format) {
    case StateFormat::fp32: return number(tile.master, DType::fp32, i);
    case StateFormat::compact:
    case StateFormat::four_bit:
      return joined(read<std::uint16_t>(tile.parameter, i), 256 * read<std::int8_t>(tile.master, i));
    default: return joined(read<std::uint16_t>(tile.parameter, i), read<std::int16_t>(tile.master, i));
  }
}

std::uint8_t code_at(const TileMemory& tile, const std::byte* codes, std::size_t i) {
  if (tile.format == StateFormat::compact) return read<std::uint8_t>(codes, i);
  const auto pair = read<std::uint8_t>(codes, i / 2);
  return i % 2 == 0 ? pair & 15 : pair >> 4;
}

DType moment_dtype(StateFormat format) { return format == StateFormat::bf16 ? DType::bf16 : DType::fp32; }

double square(double x) { return x * x; }

// A sum below the smallest normal number is as coarse as that number.
double size_of(double a, double b) { return std::max(std::abs(a) + std::abs(b), 0x1p-126); }

// Moments are never subnormal: a second moment is at least 2^-120, a first moment below the smallest normal number becomes
// zero.
double kept(double variance) { return std::max(variance, 0x1p-120); }
double flushed(double momentum) { return std::abs(momentum) < 0x1p-126 ? 0 : momentum; }

// A value that weighs more than a half, and the difference to it, which is rounded, times the smaller weight.
struct ExactMean {
  ExactMean(const RunningMean& mean, double old, double g, double g_size) {
    const double sum = g_size + std::abs(old);
    const bool is_mostly_gradient = mean.decay < 0.5f;
    value = is_mostly_gradient ? g + mean.decay * (old - g) : old + mean.one_minus_decay * (g - old);
    size = is_mostly_gradient ? size_of(g_size, mean.decay * sum) : size_of(old, mean.one_minus_decay * sum);
  }
  double value;
  double size;
};

ExactStep step(const AdamW& rule, const Element& old, double g, double g_size) {
  const ExactMean mean(rule.mean, old.momentum, g, g_size);
  ExactStep next;
  next.value.momentum = mean.value;
  next.size.momentum = mean.size;
  next.value.variance = kept(rule.beta2 * old.variance + rule.one_minus_beta2 * g * g);
  next.size.variance = kept(rule.beta2 * old.variance + rule.one_minus_beta2 * square(g_size));
  const double divisor = std::sqrt(next.value.variance) * rule.inverse_root_correction2 + rule.eps;
  next.value.parameter = old.parameter * rule.decay - rule.step_size * next.value.momentum / divisor;
  next.size.parameter = std::abs(old.parameter) + rule.step_size * next.size.momentum / divisor;
  return next;
}

ExactStep step(const AdamW& rule, const Element& old, double g) { return step(rule, old, g, std::abs(g)); }

ExactStep step(const Adam& rule, const Element& old, double g) {
  return step(rule.without_decay, old, g + rule.l2 * old.parameter, size_of(g, rule.l2 * old.parameter));
}

ExactStep step(const Sgd& rule, const Element& old, double g) {
  ExactStep next;
  next.value.parameter = old.parameter - rule.lr * (g + rule.l2 * old.parameter);
  next.size.parameter = std::abs(old.parameter) + rule.lr * size_of(g, rule.l2 * old.parameter);
  return next;
}

ExactStep step(const SgdMomentum& rule, const Element& old, double g) {
  const double g_size = size_of(g, rule.l2 * old.parameter);
  g += rule.l2 * old.parameter;
  ExactStep next;
  next.value.momentum = rule.momentum * old.momentum + rule.one_minus_dampening * g;
  next.size.momentum = size_of(rule.momentum * old.momentum, rule.one_minus_dampening * g_size);
  const double down = rule.from_momentum * next.value.momentum + rule.from_gradient * g;
  next.value.parameter = old.parameter - rule.lr * down;
  next.size.parameter =
      std::abs(old.parameter) + rule.lr * (rule.from_momentum * next.size.momentum + rule.from_gradient * g_size);
  return next;
}

ExactStep step(const Lion& rule, const Element& old, double g) {
  const double direction = ExactMean(rule.mean, old.momentum, g, std::abs(g)).value;
  const ExactMean kept_mean(rule.kept_mean, old.momentum, g, std::abs(g));
  const double sign = direction > 0 ? 1.0 : direction < 0 ? -1.0 : 0.0;
  ExactStep next;
  next.value.parameter = old.parameter * rule.decay - rule.lr * sign;
  next.size.parameter = std::abs(old.parameter) + rule.lr;
  const bool clear = std::abs(direction) > 4 * ulp(std::abs(old.momentum) + std::abs(g));
  next.doubt = clear || direction == 0 ? 0 : 2 * double{rule.lr};
  next.value.momentum = kept_mean.value;
  next.size.momentum = kept_mean.size;
  return next;
}

ExactStep step(const Adagrad& rule, const Element& old, double g) {
  const double g_size = size_of(g, rule.l2 * old.parameter);
  g += rule.l2 * old.parameter;
  ExactStep next;
  next.value.variance = kept(old.variance + g * g);
  next.size.variance = kept(old.variance + square(g_size));
  const double divisor = std::sqrt(next.value.variance) + rule.eps;
  next.value.parameter = old.parameter - rule.step_size * g / divisor;
  next.size.parameter = std::abs(old.parameter) + rule.step_size * g_size / divisor;
  return next;
}

// Its parameter is the direction.
ExactStep step(const MuonMomentum& rule, const Element& old, double g) {
  const ExactMean mean(rule.mean, old.momentum, g, std::abs(g));
  ExactStep next;
  next.value.momentum = mean.value;
  next.size.momentum = mean.size;
  next.value.parameter = rule.from_momentum * next.value.momentum + rule.from_gradient * g;
  next.size.parameter = size_of(rule.from_momentum * next.size.momentum, rule.from_gradient * g);
  return next;
}

ExactStep step(const MuonStep& rule, const Element& old, double direction) {
  ExactStep next;
  next.value.parameter = old.parameter * rule.decay - rule.step_size * direction;
  next.size.parameter = size_of(old.parameter, rule.step_size * direction);
  return next;
}

ExactStep step(const External&, const Element& old, double) { return {.value = old, .size = {}}; }

double ulp(double size, int mantissa_bits) {
  return std::ldexp(1.0, std::max(size > 0 ? std::ilogb(size) : -126, -126) - mantissa_bits);
}

}  // namespace

double gradient_of(const TileMemory& tile, std::size_t i) { return number(tile.gradient, tile.gradient_dtype, i); }

Element state_of(const TileMemory& tile, std::size_t i, const Rule& rule) {
  Element element{.parameter = master_of(tile, i)};
  if (has_scales(tile.format)) {
    if (has_momentum(rule)) {
      element.momentum = momentum_code(tile.format, code_at(tile, tile.momentum, i)) * tile.momentum_scales[i / 128];
    }
    if (has_variance(rule)) {
      element.variance =
          square(root_code(tile.format, code_at(tile, tile.variance, i)) * tile.variance_scales[i / 128]);
    }
    return element;
  }
  if (has_momentum(rule)) element.momentum = number(tile.momentum, moment_dtype(tile.format), i);
  if (has_variance(rule)) element.variance = number(tile.variance, moment_dtype(tile.format), i);
  return element;
}

ExactStep exact_step(const Rule& rule, const Element& old, double gradient) {
  ExactStep exact = std::visit([&](const auto& r) { return step(r, old, gradient); }, rule);
  exact.value.momentum = flushed(exact.value.momentum);
  return exact;
}

double bf16_value(std::uint16_t pattern) { return double{std::bit_cast<float>(std::uint32_t{pattern} << 16)}; }

double fp16_value(std::uint16_t pattern) {
  const int exponent = pattern >> 10 & 31;
  const int mantissa = pattern & 1023;
  const double size = exponent == 31  ? (mantissa == 0 ? HUGE_VAL : NAN)
                      : exponent == 0 ? std::ldexp(mantissa, -24)
                                      : std::ldexp(1024 + mantissa, exponent - 25);
  return pattern & 0x8000 ? -size : size;
}

double ulp(double size) { return ulp(size, 23); }
double coarse_ulp(double size) { return ulp(size, 7); }

// Eight segments, each twice as coarse as the one before.
double momentum_code(StateFormat format, std::uint8_t code) {
  if (format == StateFormat::compact) {
    const double size = (std::ldexp(1 + (code & 15) / 16.0, code >> 4 & 7) - 1) / 128;
    return code & 0x80 ? -size : size;
  }
  const double size = (std::ldexp(1, code & 7) - 1) / 128;
  return code & 8 ? -size : size;
}

// Eight such segments, or floats of eight exponents.
double root_code(StateFormat format, std::uint8_t code) {
  if (format == StateFormat::compact) return (std::ldexp(1 + (code & 31) / 32.0, code >> 5) - 1) / 128;
  return std::ldexp(1 + (code & 1) / 2.0, code >> 1) / 128;
}

bool has_momentum(const Rule& rule) {
  return std::visit([](const auto& r) { return r.has_momentum; }, rule);
}
bool has_variance(const Rule& rule) {
  return std::visit([](const auto& r) { return r.has_variance; }, rule);
}

}  // namespace ballast::kernels
