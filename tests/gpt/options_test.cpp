// What gpt's command line becomes, and what is refused of it.
#include "examples/gpt/options.h"

#include <catch2/catch.hpp>

using namespace ballast;
using namespace ballast::gpt;
using Catch::Contains;

namespace {

ProgramOptions parsed(const std::string& line) {
  CLI::App app;
  ProgramOptions options;
  describe(app, options);
  app.parse(line);
  return options;
}

}  // namespace

TEST_CASE("words of gpt's command line name formats and tiers") {
  const ProgramOptions options = parsed("--dtype fp32 --format compact --state host=0.25,nvme=0.75 --gradients host");
  CHECK(options.run.shape.dtype == DType::fp32);
  CHECK(options.run.training.format == kernels::StateFormat::compact);
  CHECK(options.run.training.state == Spread{.device = 0.0, .host = 0.25, .nvme = 0.75});
  CHECK(options.run.training.gradients == all_in(Tier::host));
}

TEST_CASE("gpt takes the last of an option that is given twice: a script's, then one's own") {
  CHECK(parsed("--stage 1 --stage 3").run.training.stage == 3);
  CHECK(parsed("--format fp32 --format bf16").run.training.format == kernels::StateFormat::bf16);
}

TEST_CASE("gpt refuses words that it does not know, and says which it knows") {
  CHECK_THROWS_WITH(parsed("--format fp8"),
                    Contains("--format cannot be \"fp8\"") && Contains("one of bf16, compact, fp32, split"));
  CHECK_THROWS_WITH(parsed("--dtype half"), Contains("--dtype cannot be \"half\"") && Contains("one of bf16, fp32"));
  CHECK_THROWS_WITH(parsed("--state disk"), Contains("\"disk\" is no tier") && Contains("device, host or nvme"));
  CHECK_THROWS_WITH(parsed("--state host=much"), Contains("\"host=much\" is no fraction") && Contains("host=0.5"));
}
