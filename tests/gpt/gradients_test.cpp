// The gradients of the whole model through Ballast, compared with finite differences: an SGD step with a rate of 1
// shows them.
#include "tests/gpt/model_rig.h"

using namespace ballast;
using namespace ballast::gpt;
using namespace ballast::testing;

namespace {

struct Trainer {
  Trainer(const Shape& shape, const Values& values)
      : backend(kernels::cpu_backend({.threads = 1})),
        world(lone_communicator(*backend)),
        maths(cpu_maths(1)),
        training(model_of(shape), *world, {optim::Sgd{.lr = 1.0}, optim::Sgd{.lr = 1.0}}, {.stage = 0}),
        model(shape, 2, *maths, accounts),
        text(some_text(shape, 2)) {
    training.initialize(source_of(values));
  }

  Values parameters() {
    Values values;
    for (std::size_t unit = 0; unit < training.model().units.size(); ++unit) {
      const Lease lease = training.forward(unit);
      values.emplace_back();
      for (std::size_t tensor = 0; tensor < training.model().units[unit].tensors.size(); ++tensor) {
        const auto numbers = lease[tensor].as<float>();
        values.back().emplace_back(numbers.begin(), numbers.end());
      }
    }
    return values;
  }

  std::unique_ptr<kernels::Backend> backend;
  std::unique_ptr<Communicator> world;
  std::unique_ptr<Maths> maths;
  MemoryAccounts accounts;
  Training training;
  Gpt model;
  std::vector<std::uint8_t> text;
};

double loss_of(const Shape& shape, const Values& values) {
  Trainer trainer(shape, values);
  return trainer.model.evaluate(trainer.training, trainer.text);
}

Values gradients_of(const Shape& shape, const Values& values) {
  Trainer trainer(shape, values);
  trainer.model.run(trainer.training, trainer.text);
  trainer.training.step();
  Values gradients = trainer.parameters();
  for (std::size_t unit = 0; unit < gradients.size(); ++unit) {
    for (std::size_t tensor = 0; tensor < gradients[unit].size(); ++tensor) {
      for (std::size_t i = 0; i < gradients[unit][tensor].size(); ++i) {
        gradients[unit][tensor][i] = values[unit][tensor][i] - gradients[unit][tensor][i];
      }
    }
  }
  return gradients;
}

// Returns the slope of the loss in one direction, which moves each element of a tensor by its own small amount.
double slope_along(const Shape& shape, Values values, std::pair<std::size_t, std::size_t> tensor,
                   const Floats& direction) {
  constexpr float distance = 2e-2f;
  Floats& numbers = values[tensor.first][tensor.second];
  const Floats here = numbers;
  const auto loss_at = [&](float side) {
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = here[i] + side * distance * direction[i];
    }
    return loss_of(shape, values);
  };
  return (loss_at(1.0f) - loss_at(-1.0f)) / (2 * double{distance});
}

}  // namespace

TEST_CASE("the gradient of every tensor is the slope of the loss") {
  for (const bool tied : {true, false}) {
    Shape shape = tiny();
    shape.tied = tied;
    const Model model = model_of(shape);
    const Values values = some_values(model);
    const Values gradients = gradients_of(shape, values);
    for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
      for (std::size_t tensor = 0; tensor < model.units[unit].tensors.size(); ++tensor) {
        CAPTURE(tied, model.units[unit].name, model.units[unit].tensors[tensor].name);
        const Floats& gradient = gradients[unit][tensor];
        const double size = std::sqrt(weighed(gradient, gradient));
        REQUIRE(size > 1e-4);
        Floats uphill = gradient;  // a direction in which all of the gradient counts, and one in which signs do
        for (float& number : uphill)
          number /= static_cast<float>(size);
        CHECK(slope_along(shape, values, {unit, tensor}, uphill) == Approx(size).epsilon(0.01));
        const Floats other = random_floats(gradient.size(), 99, 2.0f / std::sqrt(static_cast<float>(gradient.size())));
        CHECK(slope_along(shape, values, {unit, tensor}, other) ==
              Approx(weighed(gradient, other)).margin(size * 0.02));
      }
    }
  }
}
