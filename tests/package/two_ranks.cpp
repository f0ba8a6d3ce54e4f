// Trains on two ranks, which are threads, at stage 3: plans first, then trains, then reads the state by tensor.
#include <ballast/planner.h>
#include <ballast/tensor_state.h>

#include <cmath>
#include <stdexcept>
#include <vector>

namespace {

using namespace ballast;

constexpr std::size_t elements = 1000;

Model model() {
  Model model;
  model.unit("first", DType::fp32);
  model.tensor({"weight", {elements}});
  model.unit("second");
  model.tensor({"weight", {2, elements}});
  model.tensor({.name = "fixed", .shape = {8}, .frozen = true});
  return model;
}

void begin_at_zero(std::size_t, std::size_t, Range, const View& to) {
  for (std::byte& byte : to.as_bytes()) {
    byte = std::byte{0};
  }
}

void set_to_one(const View& gradient) {
  if (gradient.dtype() == DType::fp32) {
    for (float& value : gradient.as<float>()) {
      value = 1.0f;
    }
  } else {
    for (bf16& value : gradient.as<bf16>()) {
      value = {0x3f80};
    }
  }
}

// The momentum of every element is 0.1 after one step with gradients of 1.
bool has_right_momentum(Training& training) {
  TensorState state(training);
  std::vector<float> momentum(elements);
  state.read_moment(0, 0, Moment::momentum, momentum.data());
  for (const Range& range : state.local_ranges(0, 0)) {
    for (std::size_t i = range.first; i < range.end(); ++i) {
      if (std::abs(momentum[i] - 0.1f) > 1e-6f) return false;
    }
  }
  return true;
}

bool train(Communicator& world) {
  const TrainingOptions options{.stage = 3, .state = Tier::host, .format = StateFormat::fp32};
  const std::vector<optim::Rule> groups{optim::AdamW{}};
  const Plan plan(model(), {world.rank(), world.size()}, groups, options);
  Training training(model(), world, groups, options);
  training.start(begin_at_zero);
  training.forward(0);
  training.forward(1);
  set_to_one(training.backward(1).gradient(0));
  set_to_one(training.backward(0).gradient(0));
  const StepResult result = training.step();
  training.finish();
  return !result.skipped && training.steps() == 1 && plan.ledger() == training.ledger() && has_right_momentum(training);
}

// Plans for a machine that this one need not be.
bool plan() {
  const Model planned = model();
  const std::vector<UnitWork> work(2, {.forward_seconds = 0.1, .backward_seconds = 0.2});
  Machine machine{.bytes = {std::size_t{1} << 30, std::size_t{1} << 30, 0}};
  machine.gather = machine.reduce = machine.upload = machine.download = 1e9;
  machine.device_memory = machine.host_memory = 1e10;
  const Choice choice = choose({.model = planned, .machine = machine, .work = work, .ranks = 2});
  return choice.simulation.seconds >= 0.6 && fits(choice.ledger, machine);
}

}  // namespace

int main() {
  const int status = run_ranks(2, [](Communicator& world) {
    if (!train(world)) throw std::runtime_error("the training is not as planned");
  });
  return status == 0 && plan() ? 0 : 1;
}
