// Tests of Schedule::overlap_gathers: a step returns before full parameters are gathered, and their trainer waits for them.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <catch2/catch.hpp>

#include "tests/sanitizer.h"
#include "tests/temporary_directory.h"
#include "tests/zero/held_gathers.h"
#include "tests/zero/trainee.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

// The uses of a trainer that leases backward only, because full parameters are always there.
Trace backward_only(std::size_t units) {
  Trace trace;
  for (std::size_t unit = units; unit-- > 0;) {
    trace.push_back({unit, Phase::backward});
  }
  return trace;
}

class BackwardTrainer {
 public:
  BackwardTrainer(Communicator& world, const std::filesystem::path& directory, bool overlaps,
                  const Placement& placement = placement_of_stage(2, 2))
      : training_(plain_model(3, 100'000), world, {optim::AdamW{.lr = 0.1}}, options(directory, overlaps, placement)) {
    training_.initialize(initial_parameters());
  }

  void step() {
    for (std::size_t unit = 3; unit-- > 0;) {
      const Lease lease = training_.backward(unit);
      std::ranges::fill(lease.gradient(0).as_bytes(), std::byte{0x3c});
    }
    training_.step();
  }

  std::vector<std::byte> parameters(std::size_t unit) {
    const auto bytes = TrainingState(training_).full_parameters(unit).as_bytes();
    return {bytes.begin(), bytes.end()};
  }

  // A few of the other rank's bytes, of two: only a gather writes them, so they may be read while this rank updates its own.
  std::vector<std::byte> gathered_part(std::size_t unit, std::size_t rank) {
    const auto bytes = TrainingState(training_).full_parameters(unit).as_bytes();
    const auto part = bytes.subspan(bytes.size() * (rank == 0 ? 3 : 1) / 4, 64);
    return {part.begin(), part.end()};
  }

  Training& training() { return training_; }

 private:
  static TrainingOptions options(const std::filesystem::path& directory, bool overlaps, const Placement& placement) {
    std::filesystem::create_directories(directory);
    TrainingOptions options = options_of(placement, directory);
    options.trace = backward_only(3);
    options.schedule.overlap_gathers = overlaps;
    return options;
  }

  Training training_;
};

Placement in_tier(Tier state) {
  Placement placement = placement_of_stage(2, 1);
  placement.state = Spread(state);
  return placement;
}

// Returns the parameters of each unit after two steps, by rank.
std::vector<std::vector<std::byte>> trained(const std::filesystem::path& directory) {
  std::vector<std::vector<std::byte>> units(3);
  const auto failures = failures_of_ranks(2, [&](Communicator& world) {
    BackwardTrainer trainer(world, directory / std::to_string(world.rank()), false);
    trainer.step();
    trainer.step();
    trainer.training().finish();
    for (std::size_t unit = 0; unit < units.size() && world.rank() == 0; ++unit) {
      units[unit] = trainer.parameters(unit);
    }
  });
  REQUIRE(fmt::format("{}", fmt::join(failures, "")) == "");
  return units;
}

}  // namespace

TEST_CASE("with overlapping gathers a step returns before parameters are gathered, in the order of the next forward") {
  const TemporaryDirectory folder;
  const auto expected = trained(folder.path());
  std::array<Gate, 2> gates;
  const auto failures = failures_of_ranks(2, [&](Communicator& world) {
    Gate& gate = gates[world.rank()];
    HeldGathers held(world, gate);
    BackwardTrainer trainer(held, folder.path() / std::to_string(world.rank()), true);
    trainer.step();
    trainer.training().finish();
    const auto before = trainer.gathered_part(2, world.rank());

    const Holding holding(gate);
    trainer.step();  // returns, though nothing is gathered
    for (std::size_t unit = 0; unit < 3; ++unit) {
      gate.release(1);
      TrainingState(trainer.training()).wait_for_parameters(unit);
      if (trainer.parameters(unit) != expected[unit]) throw std::runtime_error("a unit came too late");
      if (unit < 2 && trainer.gathered_part(2, world.rank()) != before) {
        throw std::runtime_error("the last unit came too early");
      }
    }
    if (trainer.gathered_part(2, world.rank()) == before) throw std::runtime_error("the step changed nothing");
  });
  CHECK(fmt::format("{}", fmt::join(failures, "")) == "");
}

TEST_CASE("with overlapping gathers, each unit is waited for where no rank gathers and in every tier") {
  const TemporaryDirectory folder;
  for (const Placement& placement : {placement_of_stage(0, 1), in_tier(Tier::host), in_tier(Tier::nvme)}) {
    CAPTURE(text(placement));
    const auto world = single_rank();
    BackwardTrainer waiting(*world, folder.path() / "waiting", true, placement);
    BackwardTrainer finishing(*world, folder.path() / "finishing", false, placement);
    for (std::size_t step = 0; step < (sanitized ? 5 : 20); ++step) {
      waiting.step();
      finishing.step();
      finishing.training().finish();
      for (std::size_t unit = 0; unit < 3; ++unit) {
        TrainingState(waiting.training()).wait_for_parameters(unit);
        REQUIRE((waiting.parameters(unit) == finishing.parameters(unit)));
      }
    }
  }
}

TEST_CASE("nothing is waited for before the first step, and an unknown unit is refused") {
  const TemporaryDirectory folder;
  const auto failures = failures_of_ranks(2, [&](Communicator& world) {
    BackwardTrainer trainer(world, folder.path() / std::to_string(world.rank()), true);
    TrainingState(trainer.training()).wait_for_parameters(0);
    TrainingState(trainer.training()).wait_for_parameters(3);
  });
  for (const std::string& failure : failures) {
    CHECK_THAT(failure, Catch::Contains("there is no unit 3"));
  }
}
