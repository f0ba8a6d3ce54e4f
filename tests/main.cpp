// The main() of every test program. Cases tagged [gpu] need a GPU; where there is none they are reported as skipped,
// with the reason, never as passed. ctest runs each case in a process of its own.
#define CATCH_CONFIG_RUNNER
#include <algorithm>
#include <catch2/catch.hpp>

#include "kernels/runtime/device.h"
#include "tests/skip.h"

namespace {

bool only_lists(const Catch::ConfigData& asked) {
  return asked.showHelp || asked.listTests || asked.listTestNamesOnly || asked.listTags || asked.listReporters;
}

std::vector<Catch::TestCase> chosen_cases(const Catch::ConfigData& asked) {
  const Catch::Config config(asked);
  return Catch::filterTests(Catch::getAllTestCasesSorted(config), config.testSpec(), config);
}

bool needs_gpu(const Catch::TestCase& test) { return std::ranges::count(test.tags, "gpu") > 0; }

}  // namespace

int main(int count, char** arguments) {
  Catch::Session session;
  if (const int refused = session.applyCommandLine(count, arguments); refused != 0) {
    return refused;
  }
  Catch::ConfigData asked = session.configData();
  if (only_lists(asked)) {
    return session.run();
  }
  const bool everything = asked.testsOrTags.empty();
  if (everything) {
    asked.testsOrTags = {"~[.]"};
  }
  const std::vector<Catch::TestCase> cases = chosen_cases(asked);
  if (!std::ranges::any_of(cases, needs_gpu)) {
    return session.run();
  }
  if (const std::string absence = ballast::device::absence(); !absence.empty()) {
    ballast::skip("no usable GPU: " + absence);
    if (std::ranges::all_of(cases, needs_gpu)) {
      return 0;
    }
    if (everything) {
      asked.testsOrTags = {"~[.]~[gpu]"};
      session.useConfigData(asked);
    }
  }
  return session.run();
}
