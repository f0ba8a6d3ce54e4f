#include "zero/plan/state_parts.h"

#include "kernels/runtime/sizes.h"
#include "kernels/state_access.h"
#include "optim/state_layout.h"

namespace ballast {
namespace {

constexpr std::size_t part_alignment = 64;  // a cache line

optim::StateLayout state_of(const ChunkKind& kind, std::size_t elements) {
  const optim::StateNames names{.momentum = kind.momentum ? "momentum" : "",
                                .variance = kind.variance ? "variance" : "",
                                .own_values = kind.own_values};
  return {{.format = *kind.format, .parameter = kind.parameter, .names = names}, elements};
}

std::size_t parameter_bytes(const ChunkKind& kind, std::size_t elements) {
  return round_up(elements * byte_size(kind.parameter), part_alignment);
}

}  // namespace

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

std::vector<PartOfTile> parts_in(const CompiledPlan& plan, const LocalTile& tile) {
  const UnitLayout& layout = plan.layout().units[tile.unit];
  const Section& section = tile.frozen ? layout.frozen : layout.trained;
  const std::size_t rank = plan.input().rank_in_shard_group;
  const std::size_t first = tile.range.first - section.shard_range(rank).first;
  std::vector<PartOfTile> parts;
  for (const auto& [tensor, range, owner, in_shard] :
       tensors_in(plan.model().units[tile.unit], layout, section, rank, {first, tile.range.count})) {
    StatePart part{.unit = tile.unit,
                   .tensor = tensor,
                   .first = range.first,
                   .frozen = tile.frozen,
                   .memory = {.count = range.count}};
    if (tile.memory.parameter != nullptr) part.memory = kernels::part(tile.memory, in_shard - first, range.count);
    parts.push_back({part, in_shard - first});
  }
  return parts;
}

}  // namespace ballast
