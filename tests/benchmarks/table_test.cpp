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

TEST_CASE("a row shows the case, the baseline, and the ratio with its spread") {
  const Measurement measurement{
      .record = {.name = "adamw split", .value = 46.1, .unit = "GB/s", .against = "copy", .ratio = 0.97},
      .against_value = 47.5,
      .spread = 0.01};
  CHECK(
      row(measurement) ==
      "  adamw split                          46.1 GB/s    copy                             47.5 GB/s     0.97 ±0.01");
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

TEST_CASE("columns align after names of any length") {
  const auto column_of = [](const std::string& name, const std::string& against, const std::string& what) {
    const auto text = row({.record = {.name = name, .value = 123, .unit = "GB/s", .against = against, .ratio = 10.5},
                           .against_value = 456});
    CHECK(text.find(name) == 2);
    CHECK(text.find(against) != std::string::npos);
    const auto at = text.find(what);
    return at - (text.rfind('\n', at) + 1);  // npos + 1 is 0
  };
  const std::string just_fits(34, 'n');
  const std::string other_fits(30, 'a');
  for (const std::string what : {"123", "456", "10.5"}) {
    const auto column = column_of("short", "copy", what);
    CHECK(column_of(just_fits, other_fits, what) == column);
    CHECK(column_of(just_fits + "n", "copy", what) == column);
    CHECK(column_of("short", other_fits + "a", what) == column);
    CHECK(column_of(just_fits + just_fits, other_fits + other_fits, what) == column);
  }
  CHECK(column_of("short", other_fits, other_fits) == column_of(just_fits + "n", other_fits, other_fits));
  CHECK(row({.record = {.name = just_fits, .value = 1, .unit = "s"}}).find('\n') == std::string::npos);
}
