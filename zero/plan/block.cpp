#include "zero/plan/block.h"

#include <algorithm>

#include "kernels/runtime/sizes.h"

namespace ballast {
namespace {

constexpr std::size_t state_alignment = 64;  // a cache line

}  // namespace

optim::StateKind state_kind(const Unit& unit, StateFormat format, const optim::StateNames& names) {
  return {.format = unit.dtype == DType::bf16 ? format : StateFormat::fp32, .parameter = unit.dtype, .names = names};
}

Blocks::Blocks(const Model& model, const Layout& layout, const Placement& placement, const BlockOptions& options)
    : full_records_(options.full_records || placement.parameters.nvme > 0.0) {
  for (std::size_t i = 0; i < model.units.size(); ++i) {
    const Unit& unit = model.units[i];
    const std::size_t elements = layout.units[i].tile_elements;
    const optim::StateKind kind = state_kind(unit, options.format, options.names);
    const auto& state = states_.emplace_back(kind, elements);
    on_device_.emplace_back(kind, layout.units[i].device_elements);
    first_is_of_device_.push_back(layout.units[i].device_elements > 0);
    sizes_.push_back({round_up(elements * byte_size(unit.dtype), state_alignment), state.bytes()});
    const BlockSizes recorded = in_record(i);
    largest_ = {std::max(largest_.parameter, recorded.parameter), std::max(largest_.state, recorded.state)};
    for (const Range& tile : layout.units[i].frozen_tiles)
      largest_frozen_ = std::max(largest_frozen_, tile.count * byte_size(unit.dtype));
  }
  const offload::RecordPlaces places(shape(1), 1);
  const std::size_t frozen = largest_frozen_ == 0 ? 0 : offload::RecordPlaces(frozen_shape(1), 1).record_bytes();
  records_ = {places.record_bytes(), places.first_record_bytes(), frozen, offload::block_bytes,
              options.full_records ? 2u : 1u};
}

offload::RecordShape Blocks::shape(std::size_t tiles) const {
  return {.tiles = tiles, .payload_bytes = largest_.bytes(), .first_bytes = largest_.parameter};
}

offload::RecordShape Blocks::frozen_shape(std::size_t tiles) const {
  return {.tiles = tiles, .payload_bytes = largest_frozen_, .first_bytes = largest_frozen_};
}

TileMemory Blocks::recorded(std::size_t unit, std::size_t tile, std::size_t elements, std::byte* payload) const {
  const BlockSizes sizes = in_record(unit);
  TileMemory memory = state(unit, tile).tile(payload + sizes.parameter);
  memory.parameter = sizes.parameter > 0 ? payload : nullptr;
  memory.count = elements;
  return memory;
}

}  // namespace ballast
