#include "benchmarks/engine/direct_step.h"

#include "kernels/random_math.h"
#include "optim/decision.h"
#include "optim/step.h"

namespace ballast::benchmarks {

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

}  // namespace ballast::benchmarks
