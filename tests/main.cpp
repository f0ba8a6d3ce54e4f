// The main() of every test program. Cases tagged [gpu] need a GPU; without one they are reported as skipped, with the
// reason, never as passed. ctest runs each case in a process of its own. This file uses only what Catch2's versions 2
// and 3 have in common, or `auto`.
#define CATCH_CONFIG_RUNNER
#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/runtime/device.h"
#include "tests/skip.h"

namespace {

// Reads the arguments, because the versions of ConfigData have different lists.
bool only_lists(std::span<char*> arguments) {
  constexpr std::array<std::string_view, 5> others = {"-l", "-t", "-h", "-?", "--help"};
  return std::ranges::any_of(arguments, [&](std::string_view argument) {
    return argument.starts_with("--list-") || std::ranges::count(others, argument) > 0;
  });
}

auto chosen_cases(const Catch::ConfigData& asked) {
  const Catch::Config config(asked);
  return Catch::filterTests(Catch::getAllTestCasesSorted(config), config.testSpec(), config);
}

constexpr auto needs_gpu = [](const auto& test) {
  return test.getTestCaseInfo().tagsAsString().find("[gpu]") != std::string::npos;
};

}  // namespace

int main(int count, char** arguments) {
  Catch::Session session;
  if (const int refused = session.applyCommandLine(count, arguments); refused != 0) {
    return refused;
  }
  Catch::ConfigData asked = session.configData();
  if (only_lists({arguments, arguments + count})) {
    return session.run();
  }
  const bool everything = asked.testsOrTags.empty();
  if (everything) {
    asked.testsOrTags = {"~[.]"};
  }
  const auto cases = chosen_cases(asked);
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
