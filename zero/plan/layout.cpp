#include "zero/plan/layout.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <iterator>
#include <optional>

#include "kernels/runtime/sizes.h"
#include "kernels/state_math.h"

namespace ballast {
namespace {

// A copy of so many elements, 4 MiB or more, takes ten times as long as its start, and so does their update on the host.
// Eight of their records take 200 MiB of host memory.
constexpr std::size_t most_tile_elements = std::size_t{2} << 20;

// The first read and the last write of a step overlap nothing. They are below 2 % of it with so many tiles.
constexpr std::size_t tiles_of_a_rank = 128;

// A drive reaches its bandwidth with requests of this size.
constexpr std::size_t least_tile_elements = std::size_t{256} << 10;

std::size_t divided_up(std::size_t count, std::size_t parts) { return (count + parts - 1) / parts; }

// Lays tensors one after another from `section.first` on.
Section place_tensors(const Unit& unit, bool frozen, Section section, std::vector<std::size_t>& tensor_begin) {
  std::size_t end = section.first;
  for (std::size_t i = 0; i < unit.tensors.size(); ++i) {
    if (unit.tensors[i].frozen != frozen) continue;
    tensor_begin[i] = end;
    end = round_up(end + unit.tensors[i].elements(), group_size);
  }
  section.shard = round_up(divided_up(end - section.first, section.shards), group_size);
  return section;
}

// Returns the elements of each tile of a shard, but for a smaller last one.
std::size_t equal_tile(std::size_t shard, std::size_t most) {
  return shard == 0 ? 0 : round_up(divided_up(shard, divided_up(shard, most)), group_size);
}

UnitLayout cut_unit(const Unit& unit, std::size_t ranks, const TileSizes& most) {
  require(unit.parts > 0 && ranks % unit.parts == 0, Code::unsupported, [&] {
    return Problem{
        .what = fmt::format("cannot share the state of {} parts of a unit among {} ranks", unit.parts, ranks),
        .where = "unit " + unit.name,
        .needed = "stage 1, 2 or 3, and a number of ranks that can be divided by that of parts"};
  });
  UnitLayout layout;
  layout.tensor_begin.resize(unit.tensors.size());
  Section section{.first = 0, .shards = ranks / unit.parts, .parts = unit.parts};
  layout.trained = place_tensors(unit, false, section, layout.tensor_begin);
  section.first = layout.trained.count();
  layout.frozen = place_tensors(unit, true, section, layout.tensor_begin);
  layout.tile_elements = equal_tile(layout.trained.shard, most.trained);
  layout.tiles = cut({0, layout.trained.shard}, layout.tile_elements);
  // All records have the size of the largest one, so tiles of any format have as many bytes as those of bf16.
  const std::size_t frozen = round_up(most.frozen * byte_size(DType::bf16) / byte_size(unit.dtype), group_size);
  layout.frozen_tiles = cut({0, layout.frozen.shard}, equal_tile(layout.frozen.shard, frozen));
  return layout;
}

Range range_of(const Unit& unit, const UnitLayout& layout, std::size_t tensor) {
  return {layout.tensor_begin[tensor], unit.tensors[tensor].elements()};
}

// Joins the tiles whose state is on the device, and moves them before the others.
void join_on_device(UnitLayout& unit, const std::vector<Tier>& state) {
  for (std::size_t tile = 0; tile < state.size(); ++tile) {
    if (state[tile] == Tier::device) unit.device_elements += unit.tiles[tile].count;
  }
  unit.tiers.clear();
  if (unit.device_elements > 0) unit.tiers.push_back(Tier::device);
  std::ranges::copy_if(state, std::back_inserter(unit.tiers), [](Tier tier) { return tier != Tier::device; });
  if (unit.device_elements == 0) return;
  const std::size_t shard = unit.trained.shard;
  const auto others = cut({unit.device_elements, shard - unit.device_elements}, unit.tile_elements);
  unit.tiles = {{0, unit.device_elements}};
  unit.tiles.insert(unit.tiles.end(), others.begin(), others.end());
  if (others.empty()) unit.tile_elements = 0;
}

// Deals things out in the proportions of a spread. Each goes to the tier that lacks most; with the weight of `all` of them, the first
// ones go to the nearest tier.
class Dealer {
 public:
  explicit Dealer(const Spread& spread, std::optional<double> all = {}) : fractions_(spread.fractions()), all_(all) {}

  Tier deal(double weight) {
    total_ += weight;
    std::array<double, tier_count> missing{};
    for (std::size_t tier = 0; tier < tier_count; ++tier) {
      missing[tier] = fractions_[tier] * all_.value_or(total_) - dealt_[tier];
    }
    auto to = std::ranges::max_element(missing);
    if (all_) to = std::min(to, std::ranges::find_if(missing, [&](double lacks) { return lacks >= weight / 2; }));
    const auto tier = static_cast<std::size_t>(to - missing.begin());
    dealt_[tier] += weight;
    return static_cast<Tier>(tier);
  }

 private:
  std::array<double, tier_count> fractions_;
  std::optional<double> all_;
  std::array<double, tier_count> dealt_{};
  double total_ = 0.0;
};

constexpr std::size_t state_alignment = 64;  // a cache line

}  // namespace

Range intersection(const Range& a, const Range& b) {
  const std::size_t first = std::max(a.first, b.first);
  const std::size_t end = std::min(a.end(), b.end());
  return {first, end > first ? end - first : 0};
}

std::size_t shard_of(const Placement& placement, std::size_t rank) {
  const std::size_t group = rank / placement.ranks_per_group() % placement.parameter_replicas;
  const std::size_t in_group = rank % placement.ranks_per_group();
  return in_group * placement.parameter_replicas + group;
}

Layout make_layout(const Model& model, std::size_t shards, const TileSizes& sizes) {
  for (const std::size_t elements : {sizes.trained, sizes.frozen}) {
    require(elements > 0 && elements % group_size == 0, Code::bad_argument, [&] {
      return Problem{.what = fmt::format("cannot cut tiles of {} elements", elements),
                     .needed = fmt::format("a multiple of {}", group_size)};
    });
  }
  require(shards > 0, Code::bad_argument,
          [] { return Problem{.what = "cannot lay out a model for no ranks", .needed = "at least one shard"}; });
  Layout layout{.shards = shards, .units = {}};
  std::uint64_t declared = 0;
  for (const Unit& unit : model.units) {
    layout.units.push_back(cut_unit(unit, shards, sizes));
    for (const Tensor& tensor : unit.tensors) {
      layout.units.back().tensor_number.push_back(tensor.number.value_or(declared++));
    }
  }
  return layout;
}

std::size_t automatic_tile(const Model& model, std::size_t shards, Section UnitLayout::*of) {
  std::size_t elements = 0;
  for (const UnitLayout& unit : make_layout(model, shards, most_tile_elements).units) {
    elements += (unit.*of).shard;
  }
  return std::bit_floor(std::clamp(elements / tiles_of_a_rank, least_tile_elements, most_tile_elements));
}

Layout lay_out(const Model& model, const Placement& placement, std::size_t tile_elements) {
  if (tile_elements > 0) return make_layout(model, placement.shards, tile_elements);
  const TileSizes sizes{automatic_tile(model, placement.shards),
                        automatic_tile(model, placement.shards, &UnitLayout::frozen)};
  Layout layout = make_layout(model, placement.shards, sizes);
  const std::vector<UnitResidence> residences = reside(placement, layout);
  for (std::size_t unit = 0; unit < layout.units.size(); ++unit) {
    join_on_device(layout.units[unit], residences[unit].state);
  }
  return layout;
}

std::vector<UnitResidence> reside(const Placement& placement, const Layout& layout) {
  // A device alone keeps what the first units of a step need: they wait for no copy, and those of the last ones come when the others
  // are updated. Drives read and write all the time.
  std::optional<double> elements;
  std::optional<double> trained;
  if (placement.ranks() == 1 && placement.parameters.nvme + placement.state.nvme == 0.0) {
    elements = trained = 0.0;
    for (const UnitLayout& unit : layout.units) {
      *elements += static_cast<double>(unit.elements());
      *trained += static_cast<double>(unit.trained.shard);
    }
  }
  Dealer parameters(placement.parameters, elements);
  Dealer gradients(placement.gradients, trained);
  Dealer state(placement.state, trained);
  std::vector<UnitResidence> units;
  for (const UnitLayout& unit : layout.units) {
    UnitResidence& at = units.emplace_back();
    at.parameters = parameters.deal(static_cast<double>(unit.elements()));
    at.gradients = gradients.deal(static_cast<double>(unit.trained.shard));
    at.state = unit.tiers;
    if (at.state.empty()) {
      for (const Range& tile : unit.tiles) {  // parameters on a drive are read from records, so all tiles need one
        at.state.push_back(std::max(at.parameters, state.deal(static_cast<double>(tile.count))));
      }
    }
    const bool on_device = std::ranges::any_of(at.state, [](Tier tier) { return tier == Tier::device; });
    if (on_device) at.gradients = Tier::device;
  }
  return units;
}

std::vector<Range> cut(const Range& range, std::size_t tile_elements) {
  std::vector<Range> tiles;
  for (std::size_t first = range.first; first < range.end(); first += tile_elements) {
    tiles.push_back({first, std::min(tile_elements, range.end() - first)});
  }
  return tiles;
}

std::vector<kernels::Run> runs_in(const Unit& unit, const UnitLayout& layout, Range range,
                                  std::span<const std::size_t> groups) {
  std::vector<kernels::Run> runs;
  for (std::size_t i = 0; i < unit.tensors.size(); ++i) {
    const Range common = intersection(range_of(unit, layout, i), range);
    const std::size_t group = groups.empty() ? unit.tensors[i].group : groups[i];
    if (common.count == 0 || group == none) continue;
    runs.push_back({.begin = common.first - range.first,
                    .count = common.count,
                    .group = group,
                    .tensor = layout.tensor_number[i],
                    .tensor_begin = layout.tensor_begin[i]});
  }
  return runs;
}

std::vector<TensorPart> owners_of(const Unit& unit, const UnitLayout& layout, std::size_t tensor, Range range) {
  const Section& section = unit.tensors[tensor].frozen ? layout.frozen : layout.trained;
  const std::size_t begin = layout.tensor_begin[tensor];
  std::vector<TensorPart> parts;
  for (std::size_t rank = 0; rank < section.shards * section.parts; rank += section.parts) {
    const Range shard = section.shard_range(rank);
    const Range common = intersection({begin + range.first, range.count}, shard);
    if (common.count > 0) {
      parts.push_back({tensor, {common.first - begin, common.count}, rank, common.first - shard.first});
    }
  }
  return parts;
}

std::vector<TensorPart> tensors_in(const Unit& unit, const UnitLayout& layout, const Section& section, std::size_t rank,
                                   Range range) {
  const Range shard = section.shard_range(rank);
  std::vector<TensorPart> parts;
  for (std::size_t i = 0; i < unit.tensors.size(); ++i) {
    const Range common = intersection(range_of(unit, layout, i), {shard.first + range.first, range.count});
    if (common.count > 0) {
      parts.push_back({i, {common.first - layout.tensor_begin[i], common.count}, rank, common.first - shard.first});
    }
  }
  std::ranges::sort(parts, {}, &TensorPart::in_shard);
  return parts;
}

std::vector<Range> counted_in(const Unit& unit, const UnitLayout& layout, std::size_t rank) {
  if (std::ranges::all_of(unit.tensors, &Tensor::counted)) return {{0, layout.trained.shard}};
  std::vector<Range> counted;
  for (const TensorPart& part : tensors_in(unit, layout, layout.trained, rank, {0, layout.trained.shard})) {
    if (unit.tensors[part.tensor].counted) counted.push_back({part.in_shard, part.range.count});
  }
  return counted;
}

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
