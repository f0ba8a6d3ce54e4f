// What a rank keeps between steps, taken out and put in again; norms that are asked for; gradients that are not used.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <numeric>

#include "tests/temporary_directory.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

TrainingOptions options_of(const Placement& placement, const std::filesystem::path& directory) {
  const bool stage_0 = placement.shards == 1 && placement.whole_parameters;
  return {.stage = stage_0                      ? 0
                   : placement.whole_parameters ? 2
                                                : 3,
          .parameters = placement.parameters,
          .gradients = placement.gradients,
          .state = placement.state,
          .drives = {.directories = {directory}, .depth = 4},
          .tile_elements = 256};
}

std::string text(const Placement& placement) {
  const auto where = [](const Spread& spread) {
    return spread.device > 0.0 && spread.device < 1.0 ? "mixed"
           : spread.device > 0.0                      ? "device"
           : spread.host > 0.0                        ? "host"
                                                      : "nvme";
  };
  return fmt::format("{} shards, parameters {} ({}), gradients {}, state {}", placement.shards,
                     placement.whole_parameters ? "whole" : "sharded", where(placement.parameters),
                     where(placement.gradients), where(placement.state));
}

struct Trainee {
  Trainee(Communicator& world, const TrainingOptions& options)
      : training(odd_model(), world, {optim::AdamW{.lr = 0.02}, optim::AdamW{.lr = 0.01, .weight_decay = 0.0}},
                 options),
        trainer(training.model(), world.rank()) {
    training.initialise(first_parameters());
  }

  StepResult step(std::size_t number) {
    trainer.run(training, number);
    return training.step();
  }

  std::vector<std::byte> parameters() {
    std::vector<std::byte> bytes;
    training.engine().finish();
    for (std::size_t unit = 0; unit < training.model().units.size(); ++unit) {
      add_bytes(training.model().units[unit], training.forward(unit), nullptr, bytes);
    }
    return bytes;
  }

  Training training;
  SyntheticTrainer trainer;
};

// The stretches of a tile's memory that have something in them.
std::vector<std::span<std::byte>> stretches(const Training& training, const OwnTile& tile) {
  const kernels::UpdateTile& memory = tile.memory;
  const optim::StateLayout& layout = training.plan().blocks().state(tile.unit);
  std::vector<std::span<std::byte>> all{{memory.parameter, memory.count * byte_size(memory.parameter_dtype)}};
  std::byte* const begin = memory.master != nullptr ? memory.master : memory.momentum;
  all.emplace_back(begin, layout.bytes());
  return all;
}

using Taken = std::map<std::pair<std::size_t, std::size_t>, std::vector<std::vector<std::byte>>>;

Taken take_out(Training& training) {
  Taken taken;
  training.engine().look_at_state([&](const OwnTile& tile) {
    for (const auto& stretch : stretches(training, tile)) {
      taken[{tile.unit, tile.range.first}].emplace_back(stretch.begin(), stretch.end());
    }
  });
  return taken;
}

void put_in(Training& training, const Taken& taken) {
  training.engine().change_state([&](const OwnTile& tile) {
    const auto& kept = taken.at({tile.unit, tile.range.first});
    const auto places = stretches(training, tile);
    for (std::size_t i = 0; i < places.size(); ++i) {
      std::ranges::copy(kept[i], places[i].begin());
    }
  });
}

}  // namespace

TEST_CASE("state that is put into another training goes on there with the same bits") {
  for (const Placement& placement : placements(2)) {
    INFO(text(placement));
    const TemporaryDirectory directory;
    const TrainingOptions options = options_of(placement, directory.path());
    const auto failures = failures_of_ranks(2, [&](Communicator& world) {
      Trainee one(world, options);
      for (const std::size_t step : {0u, 1u, 2u})
        one.step(step);
      const Taken taken = take_out(one.training);
      Trainee other(world, options);
      put_in(other.training, taken);
      other.training.engine().continue_from(3);
      for (const std::size_t step : {3u, 4u}) {
        if (one.step(step).norm != other.step(step).norm) throw std::runtime_error("another norm");
      }
      if (one.parameters() != other.parameters()) throw std::runtime_error("other parameters");
      if (other.training.steps() != 5) throw std::runtime_error("another count");
    });
    CHECK(failures == std::vector<std::string>(2));
  }
}

TEST_CASE("the norm that is asked for is the step's, also where the trainer left the program's order") {
  for (const Placement& placement : placements(2)) {
    for (const std::size_t micro_steps : {1u, 3u}) {  // the program is made for one
      INFO(text(placement) << ", " << micro_steps << " micro-steps");
      const TemporaryDirectory directory;
      const auto failures = failures_of_ranks(2, [&](Communicator& world) {
        Trainee trainee(world, options_of(placement, directory.path()));
        for (std::size_t step = 0; step < 4; ++step) {
          for (std::size_t micro = 0; micro < micro_steps; ++micro)
            trainee.trainer.run(trainee.training, step * micro_steps + micro);
          const double asked = trainee.training.engine().gradient_norm(2.0);
          double squares = 0.0;
          for (const std::vector<double>& unit : trainee.training.engine().tensor_norms(2.0)) {
            squares = std::inner_product(unit.begin(), unit.end(), unit.begin(), squares);
          }
          if (std::abs(std::sqrt(squares) - asked) > 1e-12 * asked)
            throw std::runtime_error("tensors' norms do not add up");
          const double norm = trainee.training.step(2.0).norm;
          if (asked != norm || norm == 0.0) throw std::runtime_error(std::to_string(asked) + " is not the step's");
        }
      });
      CHECK(failures == std::vector<std::string>(2));
    }
  }
}

TEST_CASE("gradients that come after their norm was asked for are refused") {
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  Trainee trainee(*world, {.stage = 0});
  trainee.trainer.run(trainee.training, 0);
  CHECK(trainee.training.engine().gradient_norm() > 0.0);
  CHECK_THROWS_WITH(trainee.training.backward(0), Contains("B1007") && Contains("norm"));
  CHECK(trainee.training.step().step == 1);
}

TEST_CASE("gradients that are discarded change nothing") {
  for (const Placement& placement : placements(2)) {
    INFO(text(placement));
    const TemporaryDirectory directory;
    const auto failures = failures_of_ranks(2, [&](Communicator& world) {
      const TrainingOptions options = options_of(placement, directory.path());
      Trainee plain(world, options);
      Trainee other(world, options);
      plain.step(0), other.step(0);
      other.trainer.run(other.training, 77);
      const StepResult result = other.training.engine().step({.groups = other.training.groups(), .discard = true});
      if (!result.skipped || result.step != 1 || result.reason != "the gradients were discarded")
        throw std::runtime_error("not discarded: " + result.reason);
      plain.step(1), other.step(1);
      if (plain.parameters() != other.parameters()) throw std::runtime_error("other parameters");
    });
    CHECK(failures == std::vector<std::string>(2));
  }
}

TEST_CASE("whole parameters are where a trainer below stage 3 sees each update") {
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  Trainee trainee(*world, {.stage = 0});
  const ConstView whole = trainee.training.engine().whole_parameters(0);
  trainee.step(0);
  trainee.training.engine().finish();
  const Lease lease = trainee.training.forward(0);
  CHECK(lease.parameters().data() == whole.data());
  CHECK(lease.parameters().count() == whole.count());
}
