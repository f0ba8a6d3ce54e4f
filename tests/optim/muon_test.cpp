#include <catch2/catch.hpp>
#include <cmath>

#include "kernels/orthogonalize.h"
#include "optim/step.h"

using namespace ballast;
using namespace ballast::optim;

namespace {

double moved(const kernels::Quintic& step, double s) {
  return step.a * s + step.b * s * s * s + step.c * std::pow(s, 5);
}

// The least and the largest value that singular values from 0.001 to 1 become.
std::pair<double, double> range_after(const Muon& rule) {
  const kernels::NewtonSchulz how = orthogonalization_of(rule);
  double least = HUGE_VAL, largest = 0;
  for (int i = 0; i <= 3000; ++i) {
    double s = std::pow(10.0, -3.0 + i / 1000.0) / double{how.norm_factor};
    for (const kernels::Quintic& step : how.steps) {
      s = moved(step, s);
    }
    least = std::min(least, s);
    largest = std::max(largest, s);
  }
  return {least, largest};
}

Muon polar_express(int steps) { return {.ns_steps = steps, .orthogonalization = Orthogonalization::polar_express}; }

}  // namespace

TEST_CASE("Muon's coefficients are its options") {
  const Muon options{.lr = 0.02, .momentum = 0.9, .weight_decay = 0.3, .ns_steps = 3, .eps = 1e-5};
  const auto momentum = at(options, {.number = 7, .gradient_factor = 0.25f});
  CHECK(momentum.gradient_factor == 0.25f);
  CHECK(std::get<kernels::MuonMomentum>(momentum.rule).mean.one_minus_decay == static_cast<float>(1 - 0.9));
  CHECK(std::get<kernels::MuonMomentum>(momentum.rule).from_momentum == 0.9f);
  CHECK(std::get<kernels::MuonMomentum>(momentum.rule).from_gradient == static_cast<float>(1 - 0.9));
  const auto step = step_of(options, {.rows = 10, .columns = 20});
  CHECK(step.gradient_factor == 1.0f);
  CHECK(std::get<kernels::MuonStep>(step.rule).decay == static_cast<float>(1 - 0.02 * 0.3));
  CHECK(std::get<kernels::MuonStep>(step.rule).step_size == 0.02f);
  const kernels::NewtonSchulz how = orthogonalization_of(options);
  REQUIRE(how.steps.size() == 3);
  CHECK(how.steps[2].b == -4.775f);
  CHECK(how.eps == 1e-5f);
  CHECK(how.norm_factor == 1.0f);
}

TEST_CASE("without Nesterov's rule Muon's direction is its momentum") {
  const auto rule = std::get<kernels::MuonMomentum>(at(Muon{.nesterov = false}, {}).rule);
  CHECK(rule.from_momentum == 1.0f);
  CHECK(rule.from_gradient == 0.0f);
}

TEST_CASE("Muon's learning rate depends on the shape as in torch") {
  const Muon original{.lr = 0.5};
  CHECK(adjusted_lr(original, {.rows = 64, .columns = 16}) == Approx(1.0));
  CHECK(adjusted_lr(original, {.rows = 16, .columns = 64}) == Approx(0.5));
  const Muon match{.lr = 0.5, .adjust_lr_fn = AdjustLr::match_rms_adamw};
  CHECK(adjusted_lr(match, {.rows = 64, .columns = 16}) == Approx(0.8));
  CHECK(adjusted_lr(match, {.rows = 16, .columns = 100}) == Approx(1.0));
}

TEST_CASE("Polar Express brings every singular value to one, and nearer than Newton-Schulz") {
  const auto [least5, largest5] = range_after(polar_express(5));
  CHECK(least5 == Approx(0.840).margin(0.001));
  CHECK(largest5 == Approx(1.124).margin(0.001));
  for (const int steps : {8, 10}) {
    const auto [least, largest] = range_after(polar_express(steps));
    CHECK(least == Approx(1.0).margin(1e-5));
    CHECK(largest == Approx(1.0).margin(1e-5));
  }
  const auto [least, largest] = range_after({});
  CHECK(least == Approx(0.471).margin(0.001));
  CHECK(largest == Approx(1.202).margin(0.001));
}

TEST_CASE("Muon refuses invalid options with the option and the value") {
  const auto refused = [](const Muon& rule, const char* message) {
    CHECK_THROWS_WITH(rule.check(), Catch::Contains(message) && Catch::Contains("B1001"));
  };
  refused({.lr = -1.0}, "Muon with lr = -1");
  refused({.momentum = 1.0}, "Muon with momentum = 1");
  refused({.weight_decay = std::nan("")}, "Muon with weight_decay = nan");
  refused({.eps = -1e-7}, "Muon with eps");
  refused({.ns_steps = 100}, "Muon with ns_steps = 100");
  refused({.ns_steps = -1}, "Muon with ns_steps = -1");
  refused({.ns_coefficients = {1.0, HUGE_VAL, 2.0}}, "ns_coefficients = 1, inf, 2");
  Muon both = polar_express(5);
  both.ns_coefficients = {3.0, -4.0, 2.0};
  refused(both, "Polar Express");
  Muon{}.check();
  polar_express(99).check();
}
