// Measures the cost that the engine adds to the arithmetic of a step.
#include <ballast/comm.h>
#include <ballast/training.h>

#include <fmt/format.h>

#include "benchmarks/harness/buffer.h"
#include "benchmarks/harness/suite.h"
#include "kernels/backend.h"
#include "kernels/random_math.h"
#include "optim/step.h"
#include "zero/plan/compile.h"

namespace ballast::benchmarks {
namespace {

// The model that both sides of the suite train.
struct Shape {
  std::size_t units = 8;
  StateFormat format = StateFormat::split;
};

Model model_of(const Shape& shape, std::size_t elements) {
  Model model;
  for (std::size_t unit = 0; unit < shape.units; ++unit) {
    model.units.push_back({.name = "h." + std::to_string(unit), .tensors = {{"weight", {elements / shape.units}}}});
  }
  return model;
}

// Plans `elements` parameters in all, on one rank that keeps everything in its memory.
CompiledPlan plan_of(const Shape& shape, std::size_t elements) {
  return CompiledPlan(model_of(shape, elements),
                      {.format = shape.format, .names = optim::AdamW::state, .rule = "AdamW"});
}

// The arithmetic of a step on as much memory as the engine takes, without it: one kernel after the other, the least possible time.
class DirectStep {
 public:
  DirectStep(const Shape& shape, std::size_t elements, int threads);

  // Clears the gradients of each unit, the last one first, casts them to fp32 and adds their squares. Then updates each
  // tile.
  void take();

 private:
  struct UnitMemory {
    Buffer parameters;
    Buffer reduced;  // gradients in fp32
    Buffer state;
    std::vector<TileMemory> tiles{};
  };

  void add_unit(const CompiledPlan& plan, std::size_t unit);
  void sum(const UnitMemory& unit, const View& gradients, kernels::ExactSum& squares);
  void update(UnitMemory& unit, const kernels::GroupStep& group);

  std::unique_ptr<kernels::Backend> backend_;
  std::vector<UnitMemory> units_;
  std::vector<Buffer> gradients_;  // used in turn
  std::uint64_t steps_ = 0;
};

DirectStep::DirectStep(const Shape& shape, std::size_t elements, int threads)
    : backend_(kernels::cpu_backend({.threads = threads})) {
  const CompiledPlan plan = plan_of(shape, elements);
  for (std::size_t unit = 0; unit < shape.units; ++unit) {
    add_unit(plan, unit);
  }
  for (int buffer = 0; buffer < 2; ++buffer) {
    gradients_.emplace_back(units_.front().parameters.bytes());
  }
}

void DirectStep::add_unit(const CompiledPlan& plan, std::size_t number) {
  const UnitLayout& layout = plan.layout().units[number];
  const std::size_t count = layout.trained.count();
  const std::size_t state_bytes = plan.blocks().state_bytes_on_device(number);
  units_.push_back({.parameters = Buffer(count * sizeof(bf16)),
                    .reduced = Buffer(count * sizeof(float)),
                    .state = Buffer(layout.tiles.size() * state_bytes)});
  UnitMemory& unit = units_.back();
  backend_->fill(View(unit.parameters.as<bf16>()), 1.0f);
  for (const Range& range : layout.tiles) {
    auto tile = plan.blocks().state(number, 0).tile(unit.state.data() + unit.tiles.size() * state_bytes);
    tile.parameter = unit.parameters.data() + range.first * sizeof(bf16);
    tile.gradient = unit.reduced.data() + range.first * sizeof(float);
    tile.gradient_dtype = DType::fp32;
    tile.count = range.count;
    tile.first_index = range.first;
    if (tile.format == StateFormat::fp32) {
      backend_->fill(View(tile.master, tile.count, DType::fp32), 1.0f);
    }
    unit.tiles.push_back(tile);
  }
}

void DirectStep::take() {
  kernels::ExactSum squares;
  for (std::size_t unit = units_.size(); unit-- > 0;) {
    sum(units_[unit], View(gradients_[unit % gradients_.size()].as<bf16>()), squares);
  }
  const optim::Decision decision = optim::decide({.sum_of_squares = kernels::value(squares)}, optim::no_clipping);
  ++steps_;
  const kernels::GroupStep group =
      optim::at(optim::AdamW{}, {.number = steps_, .gradient_factor = decision.gradient_factor});
  for (UnitMemory& unit : units_) {
    update(unit, group);
  }
}

void DirectStep::sum(const UnitMemory& unit, const View& gradients, kernels::ExactSum& squares) {
  const View reduced(unit.reduced.as<float>());
  backend_->fill(gradients, 0.0f);
  backend_->cast(gradients, reduced);
  backend_->sum_of_squares(reduced, &squares);
}

void DirectStep::update(UnitMemory& unit, const kernels::GroupStep& group) {
  for (TileMemory& tile : unit.tiles) {
    tile.rounding_stream = kernels::rounding_stream(0, 0, steps_);
    const kernels::Run run{.begin = 0, .count = tile.count, .group = 0};
    backend_->update(tile, {&run, 1}, {&group, 1});
  }
}

// A step through the engine, by a trainer that does nothing with its leases.
class EngineStep {
 public:
  EngineStep(const Shape& shape, std::size_t elements, int threads);

  void take();  // forward, backward and step, until all work is done

 private:
  std::unique_ptr<Communicator> world_ = single_rank();
  Training training_;
};

EngineStep::EngineStep(const Shape& shape, std::size_t elements, int threads)
    : training_(model_of(shape, elements), *world_, {optim::AdamW{}},
                {.stage = 0, .format = shape.format, .threads = threads}) {
  training_.initialize(
      [&](std::size_t, std::size_t, Range, const View& to) { kernels::cpu_backend({.threads = 1})->fill(to, 1.0f); });
}

void EngineStep::take() {
  const std::size_t units = training_.model().units.size();
  for (std::size_t unit = 0; unit < units; ++unit) {
    training_.forward(unit);
  }
  for (std::size_t unit = units; unit-- > 0;) {
    training_.backward(unit);
  }
  training_.step();
  training_.finish();
}

template <class Step>
Subject steps_of(const Shape& shape, const Setting& setting) {
  const auto step = std::make_shared<Step>(shape, setting.elements, setting.threads->count());
  return {.work = 1, .run = [step] { step->take(); }};
}

std::vector<Trial> trials(const Setting& setting) {
  std::vector<Trial> all;
  for (const Shape& shape :
       {Shape{8, StateFormat::split}, Shape{64, StateFormat::split}, Shape{8, StateFormat::fp32}}) {
    all.push_back({fmt::format("step of {} units, {}", shape.units, name(shape.format)), "the arithmetic alone",
                   [&setting, shape] {
                     return Pair{steps_of<EngineStep>(shape, setting), steps_of<DirectStep>(shape, setting)};
                   },
                   "steps/s"});
  }
  return all;
}

}  // namespace
}  // namespace ballast::benchmarks

int main(int argc, char** argv) {
  return ballast::benchmarks::run_suite(
      {.name = "engine",
       .description = "Steps through the engine, compared with the same arithmetic alone",
       .most_bytes_of_an_element = 8,
       .trials = ballast::benchmarks::trials},
      argc, argv);
}
