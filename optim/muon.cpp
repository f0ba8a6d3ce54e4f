#include "optim/muon.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "optim/checks.h"

namespace ballast::optim {
namespace {

constexpr int most_steps = 99;
constexpr std::array<double, 3> default_coefficients = Muon{}.ns_coefficients;

// The polynomials of degree 5 of "The Polar Express" (arXiv 2505.16932), Algorithm 1, for singular values from 1/1000 to 1. The
// last one repeats. All but that are made for values that are larger by the safety factor, since rounding to bf16 may bring a
// value above 1.
constexpr double safety = 1.01;
constexpr std::array<double, 3> polar_express[] = {
    {8.28721201814563, -23.595886519098837, 17.300387312530933},
    {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
    {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
    {3.3184196573706015, -2.488488024314874, 0.51004894012372},
    {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
    {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
    {1.8750014808534479, -1.2500016453999487, 0.3750001645474248},
    {1.875, -1.25, 0.375},
};

kernels::Quintic rounded(const std::array<double, 3>& coefficients, double scale) {
  const double s = scale;
  return {static_cast<float>(coefficients[0] / s), static_cast<float>(coefficients[1] / (s * s * s)),
          static_cast<float>(coefficients[2] / (s * s * s * s * s))};
}

kernels::Quintic polar_express_step(std::size_t number) {
  const std::size_t last = std::size(polar_express) - 1;
  return number < last ? rounded(polar_express[number], safety) : rounded(polar_express[last], 1.0);
}

void check_coefficients(const Muon& rule) {
  const auto& coefficients = rule.ns_coefficients;
  require(std::ranges::all_of(coefficients, [](double c) { return std::isfinite(c); }), Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot use Muon with ns_coefficients = {}", fmt::join(coefficients, ", ")),
                   .needed = "three finite numbers"};
  });
  const bool own = coefficients != default_coefficients;
  require(!own || rule.orthogonalization == Orthogonalization::newton_schulz, Code::bad_argument, [] {
    return Problem{.what = "cannot use Muon with ns_coefficients and Polar Express, which has coefficients of its own",
                   .needed = "one of the two",
                   .remedy = "leave ns_coefficients out, or choose Newton-Schulz"};
  });
}

}  // namespace

void Muon::check() const {
  require_not_negative({"Muon", "lr", lr});
  require_below_one({"Muon", "momentum", momentum});
  require_not_negative({"Muon", "weight_decay", weight_decay});
  require_not_negative({"Muon", "eps", eps});
  require(ns_steps >= 0 && ns_steps <= most_steps, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot use Muon with ns_steps = {}", ns_steps),
                   .needed = fmt::format("0 to {}", most_steps),
                   .remedy = "set ns_steps to 5"};
  });
  check_coefficients(*this);
}

kernels::GroupStep at(const Muon& rule, const Step& step) {
  return {kernels::MuonMomentum{.mean = kernels::RunningMean::of(rule.momentum),
                                .from_momentum = rule.nesterov ? static_cast<float>(rule.momentum) : 1.0f,
                                .from_gradient = rule.nesterov ? static_cast<float>(1.0 - rule.momentum) : 0.0f},
          step.gradient_factor};
}

kernels::NewtonSchulz orthogonalization_of(const Muon& rule) {
  const bool polar = rule.orthogonalization == Orthogonalization::polar_express;
  kernels::NewtonSchulz how{
      .steps = {}, .norm_factor = polar ? static_cast<float>(safety) : 1.0f, .eps = static_cast<float>(rule.eps)};
  for (std::size_t step = 0; step < static_cast<std::size_t>(rule.ns_steps); ++step) {
    how.steps.push_back(polar ? polar_express_step(step) : rounded(rule.ns_coefficients, 1.0));
  }
  return how;
}

double adjusted_lr(const Muon& rule, const kernels::MatrixShape& shape) {
  const auto rows = static_cast<double>(shape.rows);
  const auto columns = static_cast<double>(shape.columns);
  switch (rule.adjust_lr_fn) {
    case AdjustLr::match_rms_adamw: return rule.lr * 0.2 * std::sqrt(std::max(rows, columns));
    case AdjustLr::original: break;
  }
  return rule.lr * std::sqrt(std::max(1.0, rows / columns));
}

kernels::GroupStep step_of(const Muon& rule, const kernels::MatrixShape& shape) {
  return {kernels::MuonStep{.decay = static_cast<float>(1.0 - rule.lr * rule.weight_decay),
                            .step_size = static_cast<float>(adjusted_lr(rule, shape))},
          1.0f};
}

}  // namespace ballast::optim
