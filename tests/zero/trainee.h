// A training and its trainer, for tests that run it step by step.
#pragma once

#include "tests/zero/training_rig.h"

namespace ballast::testing {

struct Trainee {
  Trainee(Communicator& world, const TrainingOptions& options,
          std::vector<optim::Rule> rules = {optim::AdamW{.lr = 0.02}, optim::AdamW{.lr = 0.01, .weight_decay = 0.0}})
      : training(odd_model(), world, std::move(rules), options), trainer(training.model(), world.rank()) {
    training.initialise(initial_parameters());
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
