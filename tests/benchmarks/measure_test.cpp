#include "benchmarks/harness/measure.h"

#include <catch2/catch.hpp>
#include <string>

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
