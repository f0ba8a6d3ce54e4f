#include <ballast/error.h>
#include <ballast/planner.h>

#include <catch2/catch.hpp>

#include <cmath>
#include <functional>
#include <utility>

#include "tests/plan/plan_rig.h"
#include "tests/sanitizer.h"
#include "zero/plan/choose.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

// The question for a small model on a small machine. The rates are those of an H100 divided by 1000, and the 8 million
// parameters are a thousandth of a model of 8 billion, so a step takes as long as theirs, and the search is cheap.
struct Question {
  static constexpr std::size_t units = 16;
  static constexpr std::size_t elements = units << 19;
  explicit Question(std::size_t ranks = 1) : ranks(ranks) {}

  // Asks for a machine whose tiers have these bytes for each parameter of a rank's shard. None if nothing fits.
  std::optional<Choice> operator()(double device, double host, double drives) const {
    const auto bytes = [&](double each) {
      return static_cast<std::size_t>(each * static_cast<double>(elements / ranks));
    };
    ChoiceInput input{.model = model,
                      .machine = machine,
                      .work = work,
                      .ranks = ranks,
                      .names = optim::AdamW::state,
                      .tile_elements = tile};
    input.machine.bytes = {bytes(device), bytes(host), bytes(drives)};
    try {
      Choice choice = choose(input);
      CHECK(fits(choice.ledger, input.machine));
      return choice;
    } catch (const Error& error) {
      CHECK(error.code() == Code::memory_budget);
      return {};
    }
  }

  static constexpr std::size_t tile = std::size_t{1} << 16;
  std::size_t ranks;
  Model model = plain_model(units, elements / units);
  std::vector<UnitWork> work = std::vector<UnitWork>(units, {0.015, 0.05});
  Machine machine{.gather = 350e6,
                  .reduce = 350e6,
                  .upload = 50e6,
                  .download = 50e6,
                  .read = 12e6,
                  .write = 6e6,
                  .device_memory = 3e9,
                  .host_memory = 200e6,
                  .commit_latency = 0};
};

}  // namespace

TEST_CASE("more memory of the host and added drives never make the chosen step slower") {
  constexpr double never = 1e9;
  const auto seconds_of = [](const std::optional<Choice>& choice) {
    return choice ? choice->simulation.seconds : never;
  };
  for (const std::size_t ranks : {1u, 2u}) {
    const Question question(ranks);
    for (const double device : {3.0, 6.0, 9.0, 12.0}) {
      if (sanitized && (ranks > 1 || device != 9.0)) continue;  // these take many times as long
      double alone = never;
      double with_drives = never;
      for (double host = 2.0; host <= 18.0; host += 2.0) {
        CAPTURE(ranks, device, host);
        const double less_alone = std::exchange(alone, seconds_of(question(device, host, 0.0)));
        const double less_with_drives = std::exchange(with_drives, seconds_of(question(device, host, 100.0)));
        CHECK(alone <= less_alone);
        CHECK(with_drives <= alone);
        CHECK(with_drives <= 1.05 * less_with_drives);  // a tile is a hundredth of this small model, and a unit more
      }
      CHECK(alone < never);
    }
  }
}

TEST_CASE("the greatest part that memory holds is found in a few steps") {
  const auto check = [](double least_fullness, int most_steps, const std::function<double(double)>& fullness_with) {
    int steps = 0;
    const double part = greatest_part(1.0 / 64, [&](double each) { return ++steps, fullness_with(each); });
    CHECK(fullness_with(part) <= 1.0);
    CHECK(fullness_with(part) >= least_fullness);
    CHECK(steps <= most_steps);
    return part;
  };
  check(0.99, 3, [](double part) { return 0.3 + 0.9 * part; });
  check(0.99, 4, [](double part) { return 0.3 + (part > 0.0 ? 0.05 : 0.0) + 0.9 * part; });  // transfers need slots
  check(0.99, 5, [](double part) { return 0.3 + 0.9 * part * part; });
  const double of_units = check(0.9, 12, [](double part) { return 1.8 * std::floor(part * 16) / 16; });
  CHECK(of_units >= 8.0 / 16);
  CHECK(check(0.5, 2, [](double part) { return 0.6 * part; }) == 1.0);
  CHECK(greatest_part(0.01, [](double part) { return 1.1 + part; }) == 0.0);
}

TEST_CASE("while state is on drives, the chosen placement leaves at most 3 % of the device and of the host free") {
  for (const auto& [device, host] :
       {std::pair{6.0, 6.0}, {6.0, 8.0}, {6.0, 10.0}, {9.0, 4.0}, {9.0, 6.0}, {12.0, 4.0}}) {
    CAPTURE(device, host);
    const auto choice = Question()(device, host, 100.0);
    REQUIRE(choice);
    const auto per_parameter = [&](Tier tier) {
      return static_cast<double>(bytes_in(choice->ledger, tier)) / double{Question::elements};
    };
    CHECK(per_parameter(Tier::nvme) > 0.5);
    CHECK(per_parameter(Tier::device) > 0.97 * device);
    CHECK(per_parameter(Tier::host) > 0.97 * host);
  }
}
