#include <ballast/error.h>

#include "benchmarks/harness/baseline.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <sstream>

using namespace ballast;
using namespace ballast::benchmarks;

namespace {

Record item(std::string name, std::optional<double> ratio, std::string against = "copy") {
  return {.suite = "kernels",
          .name = std::move(name),
          .value = 1,
          .unit = "GB/s",
          .against = std::move(against),
          .ratio = ratio};
}

}  // namespace

TEST_CASE("a case counts as worse only beyond the tolerance") {
  const std::vector recorded{item("a", 1.00), item("b", 1.00), item("c", 1.00), item("d", 1.00)};
  const std::vector now{item("a", 0.94), item("b", 0.96), item("c", 1.00), item("d", 5.00)};
  const auto findings = compare(recorded, now, 0.05);
  REQUIRE(findings.size() == 1);
  CHECK(findings[0].kind == Finding::Kind::worse);
  CHECK(any_worse(findings));
  CHECK(describe(findings[0]) == "worse    a vs. copy: 0.94, recorded 1.00");
  CHECK(compare(recorded, now, 0.07).empty());
}

TEST_CASE("values are not compared, only ratios") {
  auto slower_day = item("a", 0.97);
  slower_day.value = 0.5;
  CHECK(compare(std::vector{item("a", 0.97)}, std::vector{slower_day}, 0).empty());
}

TEST_CASE("missing and new cases are reported and do not count as worse") {
  const std::vector recorded{item("gone", 0.5), item("a", 1.0, "copy")};
  const std::vector now{item("a", 1.0, "scale"), item("a", 1.0, "copy"), item("new", 0.9)};
  const auto findings = compare(recorded, now, 0.05);
  REQUIRE(findings.size() == 3);
  CHECK(describe(findings[0]) == "missing  gone vs. copy: recorded 0.50, not measured now");
  CHECK(describe(findings[1]) == "new      a vs. scale: 1.00, not in the record");
  CHECK(describe(findings[2]) == "new      new vs. copy: 0.90, not in the record");
  CHECK_FALSE(any_worse(findings));
}

TEST_CASE("limits are not compared, and a ratio of NaN counts as worse") {
  CHECK(compare(std::vector{item("triad", {})}, std::vector{item("triad", {})}, 0).empty());
  CHECK(compare(std::vector{item("triad", {})}, std::vector<Record>{}, 0).empty());
  CHECK(any_worse(compare(std::vector{item("a", 1.0)}, std::vector{item("a", std::nan(""))}, 0.05)));
}

TEST_CASE("a recorded run is read with its command and date") {
  std::istringstream in(baseline_header("./run-benchmarks kernels", "2030-01-31") + "\n" + to_json(item("a", 0.9)) +
                        "\n\n" + to_json(item("b", {})) + "\n");
  const auto baseline = read_baseline(in, "runs.jsonl");
  CHECK(baseline.command == "./run-benchmarks kernels");
  CHECK(baseline.date == "2030-01-31");
  REQUIRE(baseline.records.size() == 2);
  CHECK(baseline.records[0].name == "a");
  CHECK(baseline.records[0].ratio == 0.9);
}

TEST_CASE("a run without a header is readable, and a broken line is named") {
  std::istringstream plain(to_json(item("a", 0.9)));
  CHECK(read_baseline(plain, "runs.jsonl").records.size() == 1);
  std::istringstream broken(to_json(item("a", 0.9)) + "\n{\"suite\":");
  CHECK_THROWS_WITH(read_baseline(broken, "runs.jsonl"), Catch::Contains("runs.jsonl, line 2"));
}
