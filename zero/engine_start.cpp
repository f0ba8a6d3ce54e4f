// How an engine comes to its first state.
#include <algorithm>
#include <cstring>

#include "zero/engine.h"

namespace ballast {

void Engine::initialise(const ParameterSource& source) {
  for (const Home& home : program_.homes) {
    home.on_drive ? fill_record(home, source) : fill_home(home, source);
  }
  if (parts_.plan.tiles_on_drive() > 0) records_->commit(0);
  run_entry();
}

// A range of a unit, tensor by tensor. What is padding stays zero.
void Engine::load(std::size_t unit, const Range& range, const View& to, const ParameterSource& source) const {
  const std::vector<Tensor>& tensors = parts_.plan.model().units[unit].tensors;
  const UnitLayout& layout = parts_.plan.layout().units[unit];
  for (std::size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    const std::size_t begin = layout.tensor_begin[tensor];
    const Range common = intersection(range, {begin, tensors[tensor].elements()});
    if (common.count == 0) continue;
    source(unit, tensor, {common.first - begin, common.count}, to.part(common.first - range.first, common.count));
  }
}

void Engine::fill_home(const Home& home, const ParameterSource& source) {
  const DType dtype = parts_.plan.model().units[home.unit].dtype;
  std::vector<std::byte> elsewhere(home.parameters.exists() ? 0 : home.range.count * byte_size(dtype));
  const View parameters =
      home.parameters.exists() ? slots_.view(home.parameters, dtype) : View(elsewhere.data(), home.range.count, dtype);
  load(home.unit, home.range, parameters, source);
  if (home.state.exists()) arithmetic_.begin_state(home.unit, home.range.count, parameters, slots_.bytes(home.state));
}

void Engine::fill_record(const Home& home, const ParameterSource& source) {
  const DType dtype = parts_.plan.model().units[home.unit].dtype;
  const BlockSizes& sizes = parts_.plan.blocks().of(home.unit);
  const std::span<std::byte> record = memory_for_record();
  const std::span<std::byte> block = records_->block(record);
  const View parameters(block.data(), home.range.count, dtype);
  std::ranges::fill(block, std::byte{0});
  load(home.unit, home.range, parameters, source);
  arithmetic_.begin_state(home.unit, home.range.count, parameters, block.subspan(sizes.parameter, sizes.state));
  if (home.parameters.exists()) std::ranges::copy(parameters.as_bytes(), slots_.data(home.parameters));
  records_->write(home.unit, home.tile, record).wait();
}

void Engine::resume(const ParameterSource& frozen) {
  for (const Home& home : program_.homes) {
    require(home.on_drive || home.tile == none, Code::unsupported, [&] {
      return Problem{.what = "a training was to go on whose optimizer state is not on a drive",
                     .where = "unit " + parts_.plan.model().units[home.unit].name,
                     .needed = "all of the state in records"};
    });
    if (home.tile == none) fill_frozen(home, frozen);
  }
  for (const Home& home : program_.homes) {
    if (home.on_drive) read_home(home);
  }
  if (records_) steps_ = records_->step();
  run_entry();
}

void Engine::fill_frozen(const Home& home, const ParameterSource& frozen) {
  const UnitLayout& layout = parts_.plan.layout().units[home.unit];
  const DType dtype = parts_.plan.model().units[home.unit].dtype;
  const Range range = intersection(home.range, {layout.frozen.first, layout.frozen.count()});
  if (range.count == 0) return;
  const View to = slots_.view(home.parameters, dtype).part(range.first - home.range.first, range.count);
  load(home.unit, range, to, frozen);
}

// A tile's parameter goes wherever else it is kept.
void Engine::read_home(const Home& home) {
  const std::span<std::byte> record = memory_for_record();
  const std::span<std::byte> block = records_->read(home.unit, home.tile, record).payload();
  const std::size_t width = byte_size(parts_.plan.model().units[home.unit].dtype);
  for (const Home& kept : program_.homes) {
    const Range common = intersection(kept.range, home.range);
    if (kept.unit != home.unit || !kept.parameters.exists() || common.count == 0) continue;
    std::memcpy(slots_.data(kept.parameters) + (common.first - kept.range.first) * width,
                block.data() + (common.first - home.range.first) * width, common.count * width);
  }
}

std::span<std::byte> Engine::memory_for_record() const {
  for (const std::vector<Op>* ops : {&program_.entry, &program_.ops}) {
    const auto read = std::ranges::find(*ops, OpKind::read, &Op::kind);
    if (read != ops->end()) return slots_.bytes(read->to);
  }
  fail(Code::internal, {.what = "a program with records does not read any"});
}

void Engine::run_entry() {
  Round entry{.ops = std::vector<Progress>(program_.entry.size())};
  for (std::size_t i = 0; i < program_.entry.size(); ++i) {
    issue(program_.entry[i], entry.ops[i], entry);
  }
  wait_all(entry);
  for (const Progress& progress : entry.ops) {
    if (progress.read) progress.read->payload();  // checks what stays
  }
  began_ = true;
}

}  // namespace ballast
