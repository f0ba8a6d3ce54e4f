// Tests of ranks that have parts of one model: some pairs have the same part and different data, others different
// parts.
#include <catch2/catch.hpp>
#include <cmath>

#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

// Some tensors are the same in both parts. Only the first part's count.
Model part_of_model(std::size_t part) {
  Model model = odd_model();
  for (const auto& [unit, tensor] : {std::pair{1, 2}, std::pair{4, 0}, std::pair{0, 0}}) {
    model.units[static_cast<std::size_t>(unit)].tensors[static_cast<std::size_t>(tensor)].counted = part == 0;
  }
  return model;
}

double counted_squares(Training& training) {
  const std::vector<std::vector<double>> norms = TrainingState(training).tensor_norms();
  double squares = 0.0;
  for (std::size_t unit = 0; unit < norms.size(); ++unit) {
    for (std::size_t tensor = 0; tensor < norms[unit].size(); ++tensor) {
      const Tensor& which = training.model().units[unit].tensors[tensor];
      if (which.counted) squares += norms[unit][tensor] * norms[unit][tensor];
    }
  }
  return squares;
}

}  // namespace

TEST_CASE("a norm spans the parts of a model on all ranks, and counts shared tensors once") {
  for (const int stage : {0, 2, 3}) {
    INFO("stage " << stage);
    std::vector<double> squares(4), norms(4);
    const auto failures = failures_of_ranks(4, [&](Communicator& world) {
      const std::size_t part = world.rank() % 2;
      const auto same_part = world.split(part);
      const auto other_parts = world.split(world.rank() / 2);
      TrainingOptions options{.stage = stage, .tile_elements = 256, .max_norm = 0.5};
      options.norm_group = other_parts.get();
      Training training(part_of_model(part), *same_part, {optim::AdamW{.lr = 0.02}, optim::AdamW{.lr = 0.01}}, options);
      training.initialize(initial_parameters());
      SyntheticTrainer trainer(training.model(), world.rank());
      for (std::size_t step = 0; step < 2; ++step) {
        trainer.run(training, step);
        squares[world.rank()] = counted_squares(training);
        norms[world.rank()] = training.gradient_norm();
        if (training.step().norm != norms[world.rank()]) throw std::runtime_error("the step's norm is another one");
      }
    });
    CHECK(failures == std::vector<std::string>(4));
    CHECK(norms == std::vector<double>(4, norms[0]));
    CHECK(norms[0] == Approx(std::sqrt(squares[0] + squares[1])).epsilon(1e-12));
    CHECK(squares[0] > 1.1 * squares[1]);
  }
}

TEST_CASE("gradients that are not finite in one part of a model skip the step on all ranks") {
  std::vector<std::string> reasons(4);
  const auto failures = failures_of_ranks(4, [&](Communicator& world) {
    const auto same_part = world.split(world.rank() % 2);
    const auto other_parts = world.split(world.rank() / 2);
    TrainingOptions options{.stage = 2, .tile_elements = 256};
    options.norm_group = other_parts.get();
    Training training(odd_model(), *same_part, {optim::AdamW{}, optim::AdamW{}}, options);
    training.initialize(initial_parameters());
    SyntheticTrainer trainer(training.model(), world.rank());
    if (world.rank() == 3) trainer.poison = std::numeric_limits<float>::infinity();
    trainer.run(training, 0);
    const StepResult result = training.step();
    if (!result.skipped) throw std::runtime_error("it was not skipped");
    reasons[world.rank()] = result.reason;
  });
  CHECK(failures == std::vector<std::string>(4));
  CHECK(reasons[0] == "the gradients are not finite, first in other ranks' part of the model");
  CHECK(reasons[1] == "the gradients are not finite, first in w (unit h.0)");
}
