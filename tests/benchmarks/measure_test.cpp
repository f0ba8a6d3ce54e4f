#include <ballast/error.h>

#include "benchmarks/harness/measure.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <string>

using namespace ballast;
using namespace ballast::benchmarks;

TEST_CASE("subjects run in turn, and the warm-up is discarded") {
  std::string order;
  const Subject subjects[] = {{.work = 3, .run = [&] { order += 'a'; }}, {.work = 0, .run = [&] { order += 'b'; }}};
  const auto rates = alternate(subjects, {.warm_up = 1, .count = 3});
  CHECK(order == "abababab");
  REQUIRE(rates.size() == 2);
  CHECK(rates[0].size() == 3);
  CHECK(rates[1] == Rates{0, 0, 0});
  CHECK(std::ranges::min(rates[0]) > 0);
}

TEST_CASE("the median is the middle value, or between the two middle ones") {
  CHECK(median(std::vector{3.0}) == 3.0);
  CHECK(median(std::vector{9.0, 1.0, 2.0}) == 2.0);
  CHECK(median(std::vector{4.0, 1.0, 3.0, 2.0}) == 2.5);
  CHECK_THROWS_AS(median(std::vector<double>{}), UsageError);
}
