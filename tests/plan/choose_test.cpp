#include <ballast/error.h>
#include <ballast/planner.h>

#include <catch2/catch.hpp>

#include <utility>

#include "tests/plan/plan_rig.h"

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
      double alone = never;
      for (double host = 2.0; host <= 18.0; host += 2.0) {
        CAPTURE(ranks, device, host);
        const double less_alone = std::exchange(alone, seconds_of(question(device, host, 0.0)));
        const double with_drives = seconds_of(question(device, host, 100.0));
        CHECK(alone <= less_alone);
        CHECK(with_drives <= alone);
      }
      CHECK(alone < never);
    }
  }
}
