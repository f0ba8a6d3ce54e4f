// Two trainings of one model on several emulated GPUs, whose exchanges share an order.
#include <catch2/catch.hpp>

#include "tests/comm/process_groups.h"
#include "tests/emulated_cuda/emulated.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

constexpr std::size_t steps_of_two = 4;

std::vector<std::byte> parameters_of(Training& training, const Model& model, const Stream* stream) {
  std::vector<std::byte> bytes;
  for (std::size_t unit = 0; unit < model.units.size(); ++unit)
    add_bytes(model.units[unit], training.forward(unit), stream, bytes);
  return bytes;
}

Trace visits(const Model& model, Phase phase, std::size_t first) {
  Trace trace;
  for (std::size_t unit = first; unit < model.units.size(); ++unit)
    trace.push_back({unit, phase});
  return trace;
}

// The other training uses units in a forward pass while two of the first one are in use, as in a module with parameters of two
// optimizers. Meanwhile the first one waits for memory, and the other one must not wait for its turn after that.
std::vector<std::byte> train_two(Communicator& world, TrainingOptions options) {
  const Model model = plain_model(5);
  std::optional<Stream> own_stream;
  if (options.gpu) options.stream = own_stream.emplace(*options.gpu).handle();
  const Stream* const stream = own_stream ? &*own_stream : nullptr;
  Training one(model, world, {optim::AdamW{.lr = 0.02}}, options);
  Training other(model, world, {optim::AdamW{.lr = 0.01}}, options);
  one.start(initial_parameters());
  other.start(initial_parameters());
  SyntheticTrainer trainer(model, world.rank(), stream);
  for (std::size_t step = 0; step < steps_of_two; ++step) {
    {
      const Lease outer = one.forward(0);
      const Lease inner = one.forward(1);
      trainer.run(other, visits(model, Phase::forward, 0), step);
    }
    trainer.run(one, visits(model, Phase::forward, 2), step);
    const Trace backward = visits(model, Phase::backward, 0);
    for (auto visit = backward.rbegin(); visit != backward.rend(); ++visit) {
      trainer.run(other, Trace{*visit}, step);
      trainer.run(one, Trace{*visit}, step);
    }
    one.step();
    if (step % 2 == 1) other.step({.micro_steps = 2});
  }
  std::vector<std::byte> bytes = parameters_of(one, model, stream);
  const std::vector<std::byte> more = parameters_of(other, model, stream);
  bytes.insert(bytes.end(), more.begin(), more.end());
  return bytes;
}

}  // namespace

TEST_CASE("two trainings on GPUs exchange in one order, and have the bits of the CPU") {
  const ProcessGroupRig rig(2, HostTransport::shared_memory, patient);
  Processes processes(2, [&](std::size_t rank) {
    rig.as_rank(rank, [&](Communicator& world) {
      for (const Tier state : {Tier::device, Tier::host}) {
        TrainingOptions options{.stage = 3, .state = Spread(state), .tile_elements = 256, .threads = 1};
        const std::vector<std::byte> expected = train_two(world, options);
        options.gpu = static_cast<int>(world.rank());
        options.exchanges = make_exchange_order();
        expect(train_two(world, options) == expected, "the parameters are not those of the CPU");
      }
    });
    expect(emulated::live() == emulated::Live{}, "something of the GPU was left behind");
  });
  CHECK(processes.failures() == Failures(2));
}
