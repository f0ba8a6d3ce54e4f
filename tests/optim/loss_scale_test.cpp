#include "optim/loss_scale.h"

#include <catch2/catch.hpp>

#include "kernels/runtime/error.h"
#include "optim/decision.h"

using namespace ballast::optim;

TEST_CASE("the scale halves on overflow and doubles after a quiet stretch") {
  LossScale scale({.initial = 1024.0, .growth_interval = 3});
  scale.after_step(false);
  CHECK(scale.scale() == 512.0);
  scale.after_step(true);
  scale.after_step(true);
  CHECK(scale.scale() == 512.0);
  scale.after_step(true);
  CHECK(scale.scale() == 1024.0);
  CHECK(scale.finite_steps() == 0);
}

TEST_CASE("an overflow ends the quiet stretch") {
  LossScale scale({.initial = 8.0, .growth_interval = 2});
  scale.after_step(true);
  scale.after_step(false);
  scale.after_step(true);
  CHECK(scale.scale() == 4.0);
}

TEST_CASE("the scale never leaves its bounds") {
  LossScale scale({.initial = 2.0, .growth_interval = 1, .smallest = 1.0});
  scale.after_step(false);
  scale.after_step(false);
  CHECK(scale.scale() == 1.0);
  for (int i = 0; i < 1000; ++i) {
    scale.after_step(true);
  }
  CHECK(scale.scale() == 0x1p100);
}

TEST_CASE("gradient values are the same across a change of the scale") {
  LossScale scale({.initial = 1024.0, .growth_interval = 1});
  const double gradient = 3.0;
  for (int step = 0; step < 20; ++step) {
    const double used = scale.scale();
    const Decision decision = decide({.sum_of_squares = gradient * used * gradient * used, .loss_scale = used});
    CHECK(decision.norm == gradient);
    CHECK(decision.gradient_factor * used == 1.0);
    scale.after_step(step % 3 != 0);
  }
}

TEST_CASE("a run continues with the scale it stopped at") {
  LossScale scale({.growth_interval = 10});
  scale.restore(256.0, 9);
  scale.after_step(true);
  CHECK(scale.scale() == 512.0);
  CHECK_THROWS_AS(scale.restore(0.0, 0), ballast::UsageError);
}

TEST_CASE("options that cannot work are refused") {
  CHECK_THROWS_AS(LossScale({.initial = -1.0}), ballast::UsageError);
  CHECK_THROWS_AS(LossScale({.initial = 1e300}), ballast::UsageError);
  CHECK_THROWS_AS(LossScale({.initial = 1.0, .smallest = 2.0}), ballast::UsageError);
  CHECK_THROWS_AS(LossScale({.smallest = 0.0}), ballast::UsageError);
  CHECK_THROWS_AS(LossScale({.backoff = 2.0}), ballast::UsageError);
  CHECK_THROWS_AS(LossScale({.growth_interval = 0}), ballast::UsageError);
}
