// Tests of the command line: how it is read, and what is refused.
#include <catch2/catch.hpp>

#include "benchmarks/training/run.h"

using namespace ballast;
using namespace ballast::benchmarks;
using Catch::Contains;

namespace {

RunOptions parsed(const std::string& line) {
  CLI::App app;
  RunOptions options;
  describe(app, options);
  app.parse(line);
  return options;
}

}  // namespace

TEST_CASE("the command line names formats and tiers") {
  const RunOptions options =
      parsed("--dtype fp32 --state-format compact --gradient-format bf16 --state host=0.25,nvme=0.75 --gradients host");
  CHECK(options.model.dtype == DType::fp32);
  CHECK(options.training.format == StateFormat::compact);
  CHECK(options.training.gradient_format == GradientFormat::bf16);
  CHECK(options.training.state == Spread(0.0, 0.25, 0.75));
  CHECK(options.training.gradients == Tier::host);
}

TEST_CASE("the command line uses the last value of an option that is given twice") {
  CHECK(parsed("--stage 1 --stage 3").training.stage == 3);
  CHECK(parsed("--state-format fp32 --state-format bf16").training.format == StateFormat::bf16);
}

TEST_CASE("the command line refuses an unknown word and names the known ones") {
  CHECK_THROWS_WITH(parsed("--state-format fp8"),
                    Contains("--state-format: fp8 not in {4bit,bf16,compact,fp32,split}"));
  CHECK_THROWS_WITH(parsed("--dtype half"), Contains("--dtype: half not in {bf16,fp32}"));
  CHECK_THROWS_WITH(parsed("--state disk"), Contains("there is no tier \"disk\"") && Contains("device, host or nvme"));
  CHECK_THROWS_WITH(parsed("--state host=much"),
                    Contains("cannot read \"host=much\" as a fraction") && Contains("host=0.5"));
}
