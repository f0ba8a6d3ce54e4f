#include "zero/plan/recorded_state.h"

#include <algorithm>

namespace ballast {

std::optional<RecordedState> RecordedState::of(std::span<const std::string> lines, const optim::StateNames& names) {
  std::optional<Described> described = read_description(lines);
  const std::size_t tile = largest_tile(lines);
  if (!described || tile == 0 || tile % group_size != 0) return {};
  Layout layout = make_layout(described->model, described->placement.shards, tile);
  for (std::size_t unit = 0; unit < layout.units.size(); ++unit) {
    if (layout.units[unit].tile_elements != described->tile_elements[unit]) return {};
  }
  return RecordedState(std::move(*described), std::move(layout), names);
}

RecordedState::RecordedState(Described described, Layout layout, const optim::StateNames& names)
    : described_(std::move(described)),
      layout_(std::move(layout)),
      blocks_(described_.model, layout_, described_.placement,
              {.format = described_.format, .names = names, .full_records = true}) {
  const auto named = names_in_runs(described_.model);
  for (std::size_t unit = 0; unit < layout_.units.size(); ++unit) {
    first_record_.push_back(tiles_.size());
    for (std::size_t tile = 0; tile < layout_.units[unit].tiles.size(); ++tile)
      tiles_.emplace_back(unit, tile);
    for (std::size_t tensor = 0; tensor < named[unit].size(); ++tensor) {
      if (!described_.model.units[unit].tensors[tensor].frozen) tensors_[named[unit][tensor]] = {unit, tensor};
    }
  }
}

std::vector<std::string> RecordedState::trained() const {
  std::vector<std::string> trained;
  for (const std::vector<std::string>& of_unit : names_in_runs(described_.model)) {
    std::ranges::copy_if(of_unit, std::back_inserter(trained),
                         [&](const std::string& name) { return tensors_.contains(name); });
  }
  return trained;
}

std::vector<RecordedState::Part> RecordedState::parts_of(const std::string& name, Range range) const {
  const auto [unit, tensor] = tensors_.at(name);
  const UnitLayout& layout = layout_.units[unit];
  std::vector<Part> parts;
  for (const TensorPart& owned : owners_of(described_.model.units[unit], layout, tensor, range)) {
    for (std::size_t done = 0; done < owned.range.count;) {  // from one tile of the shard to the next
      const std::size_t in_shard = owned.in_shard + done;
      const std::size_t tile = in_shard / layout.tile_elements;
      const std::size_t count = std::min(owned.range.count - done, layout.tiles[tile].end() - in_shard);
      parts.push_back({owned.rank,
                       first_record_[unit] + tile,
                       in_shard - layout.tiles[tile].first,
                       {owned.range.first + done, count}});
      done += count;
    }
  }
  return parts;
}

TileMemory RecordedState::tile(std::size_t record, std::byte* payload) const {
  const auto [unit, tile] = tiles_.at(record);
  return blocks_.recorded(unit, tile, layout_.units[unit].tiles[tile].count, payload);
}

}  // namespace ballast
