// A training and its trainer, for tests that run it step by step.
#pragma once

#include <fmt/format.h>

#include "tests/zero/training_rig.h"

namespace ballast::testing {

// The options of a training with this placement, whose drives are one directory.
inline TrainingOptions options_of(const Placement& placement, const std::filesystem::path& directory) {
  const bool stage_0 = placement.shards == 1 && placement.full_parameters;
  return {.stage = stage_0                     ? 0
                   : placement.full_parameters ? 2
                                               : 3,
          .parameters = placement.parameters,
          .gradients = placement.gradients,
          .state = placement.state,
          .drives = {.directories = {directory}, .depth = 4},
          .tile_elements = 256};
}

inline std::string text(const Placement& placement) {
  const auto where = [](const Spread& spread) {
    return spread.device > 0.0 && spread.device < 1.0 ? "mixed"
           : spread.device > 0.0                      ? "device"
           : spread.host > 0.0                        ? "host"
                                                      : "nvme";
  };
  return fmt::format("{} shards, parameters {} ({}), gradients {}, state {}", placement.shards,
                     placement.full_parameters ? "whole" : "sharded", where(placement.parameters),
                     where(placement.gradients), where(placement.state));
}

struct Trainee {
  Trainee(Communicator& world, const TrainingOptions& options,
          std::vector<optim::Rule> rules = {optim::AdamW{.lr = 0.02}, optim::AdamW{.lr = 0.01, .weight_decay = 0.0}})
      : training(odd_model(), world, std::move(rules), options), trainer(training.model(), world.rank()) {
    training.initialize(initial_parameters());
  }

  StepResult step(std::size_t number) {
    trainer.run(training, number);
    return training.step();
  }

  std::vector<std::byte> parameters() {
    std::vector<std::byte> bytes;
    training.finish();
    for (std::size_t unit = 0; unit < training.model().units.size(); ++unit) {
      add_bytes(training.model().units[unit], training.forward(unit), nullptr, bytes);
    }
    return bytes;
  }

  Training training;
  SyntheticTrainer trainer;
};

}  // namespace ballast::testing
