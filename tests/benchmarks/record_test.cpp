#include <ballast/error.h>

#include "benchmarks/harness/record.h"

#include <catch2/catch.hpp>

using namespace ballast;
using namespace ballast::benchmarks;

namespace {

Record example() {
  return {.suite = "kernels",
          .name = "adamw \"split\"",
          .value = 46.5,
          .unit = "GB/s",
          .against = "copy",
          .ratio = 0.75,
          .machine = "A processor, 2 cores",
          .commit = "0123abc"};
}

}  // namespace

TEST_CASE("a record is one line with its eight fields and no others") {
  CHECK(to_json(example()) ==
        R"({"suite":"kernels","case":"adamw \"split\"","value":46.5,"unit":"GB/s","against":"copy","ratio":0.75,)"
        R"("machine":"A processor, 2 cores","commit":"0123abc"})");
}

TEST_CASE("a limit has no ratio") {
  auto record = example();
  record.ratio.reset();
  const auto line = to_json(record);
  CHECK(line.find(R"("ratio":null)") != std::string::npos);
  CHECK_FALSE(measurement_from_json(line, "here").record.ratio.has_value());
}

TEST_CASE("a measurement survives writing and reading") {
  const Measurement written{.record = example(), .against_value = 62.0, .spread = 0.125};
  const auto read = measurement_from_json(to_json(written), "here");
  CHECK(to_json(read) == to_json(written));
}

TEST_CASE("a line that is not a record is refused with its file and number") {
  for (const auto* line : {"", "adamw 46 GB/s", "[]", R"({"suite":"kernels","case":"a"})",
                           R"({"suite":"kernels","case":"a","value":"fast","unit":"GB/s"})"}) {
    CHECK_THROWS_WITH(measurement_from_json(line, "runs.jsonl, line 7"), Catch::Contains("runs.jsonl, line 7"));
  }
}
