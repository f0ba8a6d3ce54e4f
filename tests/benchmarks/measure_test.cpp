#include <ballast/error.h>

#include "benchmarks/harness/measure.h"

#include <catch2/catch.hpp>
#include <string>

using namespace ballast;
using namespace ballast::benchmarks;

TEST_CASE("subjects run in turn, and the warm-up is discarded") {
  std::string order;
  const Subject subjects[] = {{.work = 3, .run = [&] { order += 'a'; }}, {.work = 5, .run = [&] { order += 'b'; }}};
  const auto runs = alternate(subjects, {.warm_up = 1, .count = 3});
  CHECK(order == "abababab");
  REQUIRE(runs.size() == 2);
  CHECK(runs[0].work == 3);
  CHECK(runs[1].work == 5);
  CHECK(runs[0].seconds.size() == 3);
  CHECK(runs[1].seconds.size() == 3);
}

TEST_CASE("the median is the middle value, or between the two middle ones") {
  CHECK(median(std::vector{3.0}) == 3.0);
  CHECK(median(std::vector{9.0, 1.0, 2.0}) == 2.0);
  CHECK(median(std::vector{4.0, 1.0, 3.0, 2.0}) == 2.5);
  CHECK_THROWS_AS(median(std::vector<double>{}), UsageError);
}

TEST_CASE("quantiles reach from the smallest to the largest value") {
  const std::vector values{50.0, 10.0, 30.0, 20.0, 40.0};
  CHECK(quantile(values, 0) == 10.0);
  CHECK(quantile(values, 0.25) == 20.0);
  CHECK(quantile(values, 0.6) == Approx(34.0));
  CHECK(quantile(values, 1) == 50.0);
  CHECK_THROWS_AS(quantile(values, 1.01), UsageError);
}

TEST_CASE("the spread is half the distance of the quartiles relative to the median") {
  CHECK(spread(std::vector{10.0, 20.0, 30.0, 40.0, 50.0}) == Approx(10.0 / 30.0));
  CHECK(spread(std::vector{7.0, 7.0, 7.0}) == 0.0);
}

TEST_CASE("the ratio is the median of the rounds' ratios, not the ratio of the medians") {
  // The machine is three times slower for both in some rounds. A disturbance affects the case alone in one round.
  const Runs subject{.work = 2, .seconds = {1, 3, 30, 1, 3}};
  const Runs against{.work = 1, .seconds = {1, 3, 3, 1, 3}};
  const auto summary = summarise(subject, against);
  CHECK(summary.ratio == Approx(2.0));
  CHECK(summary.spread == 0.0);
  CHECK(summary.value == Approx(2.0 / 3));
  CHECK(summary.against_value == Approx(1.0 / 3));
}

TEST_CASE("different numbers of rounds are refused") {
  CHECK_THROWS_AS(summarise({.work = 1, .seconds = {1, 2}}, {.work = 1, .seconds = {1}}), UsageError);
}
