#include "benchmarks/harness/table.h"

#include <catch2/catch.hpp>

using namespace ballast::benchmarks;

TEST_CASE("numbers keep three digits") {
  CHECK(number(0.0456) == "0.046");
  CHECK(number(0.9994) == "0.999");
  CHECK(number(1.234) == "1.23");
  CHECK(number(9.999) == "10.0");
  CHECK(number(46.123) == "46.1");
  CHECK(number(99.96) == "100");
  CHECK(number(1234.5) == "1234");
  CHECK(number(-46.123) == "-46.1");
}

TEST_CASE("a row shows the case, what it stood beside, and the ratio with its spread") {
  const Measurement measurement{
      .record = {.name = "adamw split", .value = 46.1, .unit = "GB/s", .against = "copy", .ratio = 0.97},
      .against_value = 47.5,
      .spread = 0.01};
  CHECK(row(measurement) ==
        "  adamw split                          46.1 GB/s    copy                           47.5 GB/s     0.97 ±0.01");
}

TEST_CASE("a limit's row ends after its value") {
  CHECK(row({.record = {.name = "triad", .value = 42.0, .unit = "GB/s"}}) ==
        "  triad                                42.0 GB/s");
}

TEST_CASE("rows of different cases align") {
  const auto short_one = row({.record = {.name = "a", .value = 1, .unit = "s", .against = "b", .ratio = 1.0}});
  const auto long_one =
      row({.record = {
               .name = "adamw compact, from cache", .value = 123, .unit = "GB/s", .against = "copy", .ratio = 10.5}});
  CHECK(short_one.find('.') != std::string::npos);
  CHECK(short_one.find("±") == long_one.find("±"));
}
