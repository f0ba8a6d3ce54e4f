#include <ballast/error.h>

#include "optim/step.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

using namespace ballast::optim;

TEST_CASE("gradients are unscaled and averaged by one factor") {
  const Decision decision = decide({.sum_of_squares = 64.0, .loss_scale = 4.0, .averaged_over = 2.0});
  CHECK_FALSE(decision.skip);
  CHECK(decision.norm == 1.0);
  CHECK(decision.gradient_factor == 0.125f);
}

TEST_CASE("clipping acts on the true norm, and never enlarges") {
  const GradientFacts facts{.sum_of_squares = 100.0 * 100.0, .loss_scale = 10.0};
  CHECK(decide(facts, 2.0).norm == 10.0);
  CHECK(decide(facts, 2.0).gradient_factor == Approx(0.2 / 10.0).epsilon(1e-6));
  CHECK(decide(facts, 20.0).gradient_factor == 0.1f);
  CHECK(decide({.sum_of_squares = 0.0}, 1.0).gradient_factor == 1.0f);
}

TEST_CASE("a step without finite gradients is skipped") {
  CHECK(decide({.sum_of_squares = 1.0, .finite = false}).skip);
  CHECK(decide({.sum_of_squares = std::numeric_limits<double>::infinity()}).skip);
  CHECK(decide({.sum_of_squares = std::nan("")}).skip);
}

TEST_CASE("an invalid loss scale is refused, not taken for an overflow") {
  for (const double scale : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    CHECK_THROWS_AS(decide({.sum_of_squares = 1.0, .loss_scale = scale}), ballast::UsageError);
  }
  CHECK_THROWS_AS(decide({.sum_of_squares = 1.0, .averaged_over = 0.0}), ballast::UsageError);
}

TEST_CASE("a norm to clip to must be above zero") {
  CHECK_THROWS_AS(decide({.sum_of_squares = 1.0}, 0.0), ballast::UsageError);
  CHECK_THROWS_AS(decide({.sum_of_squares = 1.0}, std::nan("")), ballast::UsageError);
}
