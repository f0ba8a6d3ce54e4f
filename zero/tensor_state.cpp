#include <ballast/tensor_state.h>

#include <algorithm>

#include "kernels/runtime/sizes.h"
#include "kernels/state_access.h"
#include "optim/state_layout.h"
#include "zero/plan/compile.h"
#include "zero/plan/layout.h"

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

constexpr std::size_t part_alignment = 64;  // a cache line

optim::StateLayout state_of(const ChunkKind& kind, std::size_t elements) {
  const optim::StateNames names{.momentum = kind.momentum ? "momentum" : "",
                                .variance = kind.variance ? "variance" : ""};
  return {{.format = *kind.format, .parameter = kind.parameter, .names = names}, elements};
}

std::size_t parameter_bytes(const ChunkKind& kind, std::size_t elements) {
  return round_up(elements * byte_size(kind.parameter), part_alignment);
}

}  // namespace

// Visits the tensors' parts in a tile, with the position at which each begins.
template <class Visit>
void TensorState::each_part(const LocalTile& tile, Visit&& visit) const {
  const UnitLayout& layout = training_.plan().compiled().layout().units[tile.unit];
  const Section& section = tile.frozen ? layout.frozen : layout.trained;
  const std::size_t first = tile.range.first - section.shard_range(rank()).first;
  for (const TensorPart& part :
       tensors_in(training_.model().units[tile.unit], layout, section, rank(), {first, tile.range.count})) {
    visit(part.tensor, part.range, part.in_shard - first);
  }
}

void TensorState::visit_parts(const LocalTile& tile, const Visitor& visitor) const {
  each_part(tile, [&](std::size_t tensor, const Range& range, std::size_t in_tile) {
    visitor({tile.unit, tensor, range.first, tile.frozen, kernels::part(tile.memory, in_tile, range.count)});
  });
}

std::size_t TensorState::rank() const { return training_.plan().compiled().input().rank_in_shard_group; }

std::vector<Range> TensorState::local_ranges(std::size_t unit, std::size_t tensor) const {
  const Unit& model = training_.model().units.at(unit);
  const UnitLayout& layout = training_.plan().compiled().layout().units[unit];
  std::vector<Range> ranges;
  for (const TensorPart& part : owners_of(model, layout, tensor, {0, model.tensors.at(tensor).elements()})) {
    if (part.rank == rank()) ranges.push_back(part.range);
  }
  return ranges;
}

ChunkKind TensorState::chunk_kind(std::size_t unit) const {
  std::byte anywhere{};
  return kind_of(training_.plan().compiled().blocks().state(unit, 0).tile(&anywhere), false);
}

std::vector<StatePart> TensorState::parts() const {
  std::vector<StatePart> parts;
  for (const LocalTile& tile : training_.local_tiles()) {
    each_part(tile, [&](std::size_t tensor, const Range& range, std::size_t) {
      parts.push_back({tile.unit, tensor, range.first, tile.frozen, {.count = range.count}});
    });
  }
  return parts;
}

void TensorState::visit(const Visitor& visitor) {
  training_.visit_state([&](const LocalTile& tile) { visit_parts(tile, visitor); });
}

void TensorState::change(const Visitor& visitor, const std::function<void()>& agree) {
  training_.change_state([&](const LocalTile& tile) { visit_parts(tile, visitor); }, agree);
}

void TensorState::read_moment(std::size_t unit, std::size_t tensor, Moment moment, float* into) {
  std::vector<float> values;
  const auto each_part_of_it = [&](const LocalTile& tile, auto&& visit) {
    if (tile.unit != unit || tile.frozen) return;
    each_part(tile, [&](std::size_t found, const Range& range, std::size_t in_tile) {
      if (found == tensor) visit(range, in_tile);
    });
  };
  training_.visit_state(
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
  training_.change_state([&](const LocalTile& tile) {
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
  training_.change_state([&](const LocalTile& tile) {
    const std::size_t width = byte_size(tile.memory.parameter_dtype);
    each_part(tile, [&](std::size_t tensor, const Range& range, std::size_t in_tile) {
      const bool is_new = writer(tile.unit, tensor, range, tile.memory.parameter + in_tile * width);
      if (is_new && !tile.frozen) kernels::begin_master(kernels::part(tile.memory, in_tile, range.count), *backend);
    });
  });
}

void TensorState::take_full_parameters(const TensorSet& written) {
  const auto backend = kernels::cpu_backend({.threads = 1});
  training_.change_state([&](const LocalTile& tile) {
    const View part = training_.full_parameters(tile.unit).part(tile.range.first, tile.range.count);
    training_.read_memory(part, tile.memory.parameter);
    if (tile.frozen) return;
    each_part(tile, [&](std::size_t tensor, const Range& range, std::size_t in_tile) {
      if (!written.contains({tile.unit, tensor})) return;
      kernels::begin_master(kernels::part(tile.memory, in_tile, range.count), *backend);
    });
  });
}

std::size_t ChunkKind::bytes(std::size_t elements) const {
  if (!format) return elements * byte_size(parameter);
  return parameter_bytes(*this, elements) + state_of(*this, elements).bytes();
}

TileMemory ChunkKind::tile(std::byte* chunk, std::size_t elements) const {
  TileMemory tile{.parameter_dtype = parameter, .count = elements};
  if (format) tile = state_of(*this, elements).tile(chunk + parameter_bytes(*this, elements));
  tile.parameter = chunk;
  return tile;
}

ChunkKind kind_of(const TileMemory& tile, bool frozen) {
  return {.parameter = tile.parameter_dtype,
          .format = frozen ? std::nullopt : std::optional(tile.format),
          .momentum = tile.momentum != nullptr,
          .variance = tile.variance != nullptr};
}

}  // namespace ballast
