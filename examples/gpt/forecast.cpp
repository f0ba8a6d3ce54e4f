#include "examples/gpt/forecast.h"

#include <algorithm>

#include "examples/gpt/gpt.h"
#include "examples/gpt/rates.h"
#include "zero/plan/compiled_plan.h"
#include "zero/plan/simulate.h"

namespace ballast::gpt {
namespace {

constexpr std::size_t most_drive_bytes = std::size_t{2} << 30;

// Measures a GPT of one block, on this rank alone and without optimizer state: this needs little memory, and has the
// same arithmetic.
std::vector<UnitWork> work_of_one_block(const RunOptions& options, Communicator& world, Maths& maths) {
  Shape shape = options.shape;
  shape.layers = 1;
  const auto alone = world.split(world.rank());
  const optim::Rule resting = optim::Sgd{.lr = 0.0};
  Training training(model_of(shape), *alone, {resting, resting},
                    {.stage = 0, .keeps_timeline = true, .threads = options.training.threads});
  MemoryAccounts accounts;
  Gpt model(shape, options.batch, maths, accounts);
  training.start(initial_parameters(shape, options.seed));
  world.barrier();  // the ranks compute at the same time, as in the training
  model.run(training, std::vector<std::uint8_t>(options.batch * (shape.context + 1)));
  std::vector<UnitWork> work = training.unit_work();
  training.step();
  return work;
}

std::vector<UnitWork> work_of_units(const RunOptions& options, Communicator& world, Maths& maths) {
  work_of_one_block(options, world, maths);  // the first one warms up
  const std::vector<UnitWork> measured = work_of_one_block(options, world, maths);
  std::vector<UnitWork> work(options.shape.units(), measured[1]);
  work.front() = measured.front();
  work.back() = measured.back();
  return work;
}

double forward_share(std::span<const UnitWork> work) {
  double forward = 0, both = 0;
  for (const UnitWork& unit : work) {
    forward += unit.forward_seconds;
    both += unit.forward_seconds + unit.backward_seconds;
  }
  return forward / both;
}

}  // namespace

Forecast forecast(const RunOptions& options, const Plan& plan, Communicator& world, Maths& maths) {
  require(!options.training.gpu, Code::unsupported,
          [] { return Problem{.what = "cannot forecast a training on a GPU", .needed = "a training on CPUs"}; });
  const CompiledPlan& compiled = plan.compiled();
  const UnitLayout& block = compiled.layout().units[options.shape.blocks_begin()];
  RateOptions rates{.unit_elements = block.elements(),
                    .tile_elements = std::max(block.tile_elements, block.device_elements),
                    .format = options.training.format,
                    .threads = options.training.threads};
  if (compiled.tiles_on_drive() > 0) rates.directories = options.training.drives.directories;
  // Many drives are fast for some seconds only, so a step that moves more is measured longer.
  const std::size_t on_drives = compiled.tiles_on_drive() * compiled.blocks().records().record;
  rates.drive_bytes = std::clamp(on_drives / 8, rates.drive_bytes, most_drive_bytes);
  const Machine machine = measure_rates(world, rates);
  const std::vector<UnitWork> work = work_of_units(options, world, maths);
  return {machine, simulate({compiled.program(), plan.placement(), machine, work, options.waits_for_updates}),
          forward_share(work)};
}

}  // namespace ballast::gpt
