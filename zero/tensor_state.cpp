#include <ballast/tensor_state.h>

#include <algorithm>

#include "kernels/state_access.h"
#include "zero/plan/state_parts.h"

namespace ballast {
namespace {

std::vector<Moment> moments_in(const TileMemory& tile) {
  std::vector<Moment> moments;
  if (tile.momentum != nullptr) moments.push_back(Moment::momentum);
  if (tile.variance != nullptr) moments.push_back(Moment::variance);
  for (std::size_t number = 0; number < tile.own.count; ++number)
    moments.push_back(own_value(number));
  return moments;
}

}  // namespace

// Visits the tensors' parts in a tile, with the position at which each begins.
template <class Visit>
void TensorState::each_part(const LocalTile& tile, Visit&& visit) const {
  for (const PartOfTile& each : parts_in(compiled(training_.plan()), tile))
    visit(each.part.tensor, Range{each.part.first, each.part.memory.count}, each.in_tile);
}

std::size_t TensorState::rank() const { return compiled(training_.plan()).input().rank_in_shard_group; }

std::vector<Range> TensorState::local_ranges(std::size_t unit, std::size_t tensor) const {
  const Unit& model = training_.model().units.at(unit);
  const UnitLayout& layout = compiled(training_.plan()).layout().units[unit];
  const Section& section = model.tensors.at(tensor).frozen ? layout.frozen : layout.trained;
  std::vector<Range> ranges;
  for (const TensorPart& part : tensors_in(model, layout, section, rank(), {0, section.shard})) {
    if (part.tensor == tensor) ranges.push_back(part.range);
  }
  return ranges;
}

ChunkKind TensorState::chunk_kind(std::size_t unit) const {
  std::byte anywhere{};
  return kind_of(compiled(training_.plan()).blocks().state(unit, 0).tile(&anywhere), false);
}

std::vector<StatePart> TensorState::parts() const {
  std::vector<StatePart> parts;
  for (const LocalTile& tile : tiles_.tiles()) {
    for (const PartOfTile& each : parts_in(compiled(training_.plan()), tile))
      parts.push_back(each.part);
  }
  return parts;
}

namespace {

TileVisitor by_part(const CompiledPlan& plan, const TensorState::Visitor& visitor) {
  return [&](const LocalTile& tile) {
    for (const PartOfTile& each : parts_in(plan, tile))
      visitor(each.part);
  };
}

}  // namespace

void TensorState::visit(const Visitor& visitor, const Filter& which) {
  const CompiledPlan& plan = compiled(training_.plan());
  tiles_.visit(by_part(plan, visitor), [&](const LocalTile& tile) {
    std::vector<std::pair<StatePart, std::size_t>> parts;
    for (const PartOfTile& each : parts_in(plan, tile))
      parts.emplace_back(each.part, each.in_tile);
    return !which || which(parts, tile.record);
  });
}

void TensorState::change(const Visitor& visitor, const std::function<void()>& agree) {
  tiles_.change(by_part(compiled(training_.plan()), visitor), agree);
}

void TensorState::read_moment(std::size_t unit, std::size_t tensor, Moment moment, float* into) {
  std::vector<float> values;
  const auto each_part_of_it = [&](const LocalTile& tile, auto&& visit) {
    if (tile.unit != unit || tile.frozen) return;
    each_part(tile, [&](std::size_t found, const Range& range, std::size_t in_tile) {
      if (found == tensor) visit(range, in_tile);
    });
  };
  tiles_.visit(
      [&](const LocalTile& tile) {
        values.resize(tile.memory.count);
        kernels::read_moment(tile.memory, moment, values);
        each_part_of_it(tile, [&](const Range& range, std::size_t in_tile) {
          std::copy_n(values.data() + in_tile, range.count, into + range.first);
        });
      },
      [&](const LocalTile& tile) {  // other tiles may be on drives
        bool has_some = false;
        each_part_of_it(tile, [&](const Range&, std::size_t) { has_some = true; });
        return has_some;
      });
}

void TensorState::write_moments(const MomentSource& source) {
  std::vector<float> values;
  tiles_.change([&](const LocalTile& tile) {
    for (const Moment moment : moments_in(tile.memory)) {
      values.resize(tile.memory.count);
      kernels::read_moment(tile.memory, moment, values);
      each_part(tile, [&](std::size_t tensor, const Range& range, std::size_t in_tile) {
        const float* const from = source(tile.unit, tensor, moment);
        if (from != nullptr) std::copy_n(from + range.first, range.count, values.data() + in_tile);
      });
      kernels::write_moment(tile.memory, moment, values);
    }
  });
}

void TensorState::write_parameters(const ParameterWriter& writer) {
  const auto backend = kernels::cpu_backend({.threads = 1});
  tiles_.change([&](const LocalTile& tile) {
    const std::size_t width = byte_size(tile.memory.parameter_dtype);
    each_part(tile, [&](std::size_t tensor, const Range& range, std::size_t in_tile) {
      const bool is_new = writer(tile.unit, tensor, range, tile.memory.parameter + in_tile * width);
      if (is_new && !tile.frozen) kernels::begin_master(kernels::part(tile.memory, in_tile, range.count), *backend);
    });
  });
}

void TensorState::take_full_parameters(const TensorSet& written) {
  const auto backend = kernels::cpu_backend({.threads = 1});
  tiles_.change([&](const LocalTile& tile) {
    const View part = tiles_.full_parameters(tile.unit).part(tile.range.first, tile.range.count);
    tiles_.read_memory(part, tile.memory.parameter);
    if (tile.frozen) return;
    each_part(tile, [&](std::size_t tensor, const Range& range, std::size_t in_tile) {
      if (!written.contains({tile.unit, tensor})) return;
      kernels::begin_master(kernels::part(tile.memory, in_tile, range.count), *backend);
    });
  });
}

}  // namespace ballast
