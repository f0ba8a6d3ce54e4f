#include "zero/plan/compiler_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <span>

#include "kernels/exact_sum_math.h"
#include "kernels/runtime/host_pages.h"
#include "kernels/runtime/sizes.h"
#include "zero/plan/collective_memory.h"

namespace ballast {
namespace {

constexpr std::size_t pieces_in_flight = 2;     // one is filled while the other is used
constexpr std::size_t tiles_on_their_way = 4;   // tiles that move from the device to updates on the host
constexpr std::size_t mirrored_in_flight = 2;   // one arrives while the other is written
constexpr std::size_t first_regions_ahead = 8;  // read for the gathers that come next

std::size_t bytes_of(std::span<const Visit> visits, const std::vector<std::size_t>& unit_bytes) {
  std::set<std::size_t> units;
  std::size_t bytes = 0;
  for (const Visit& visit : visits) {
    if (units.insert(visit.unit).second) bytes += unit_bytes[visit.unit];
  }
  return bytes;
}

// Returns how many units' memory is held at once, at most: in the trace, and for any unit that an off-plan step uses.
std::size_t longest_chain(const Model& model, const Uses& uses) {
  std::size_t longest = 1;
  for (std::size_t i = 0; i < uses.trace().size(); ++i) {
    longest = std::max(longest, uses.end_of_chain(i) - i);
  }
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    longest = std::max(longest, visits_of(model, unit, Phase::forward).size());
  }
  return longest;
}

// Returns enough for any unit in the trace with the `prefetch` ones after it, and for units that are held together, whether
// they are in the trace or not. `unit_bytes`: of each unit's full parameters, aligned; 0 where they stay.
std::size_t bytes_to_gather(const Model& model, const Uses& uses, std::size_t prefetch,
                            const std::vector<std::size_t>& unit_bytes) {
  const std::span<const Visit> trace = uses.trace();
  std::size_t most = 0;
  for (std::size_t i = 0; i < trace.size(); ++i) {
    const std::size_t prefetched = uses.end_of_units(i, prefetch, trace.size());
    const std::size_t end = std::max(prefetched, std::min(uses.end_of_chain(i), trace.size()));
    most = std::max(most, bytes_of(trace.subspan(i, end - i), unit_bytes));
  }
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    most = std::max(most, bytes_of(visits_of(model, unit, Phase::forward), unit_bytes));
  }
  return most;
}

}  // namespace

std::size_t SlotList::add(SlotRole role, Tier tier, std::size_t bytes, std::string_view which) {
  all_.push_back(
      {role, which.empty() ? std::string(name(role)) : fmt::format("{}.{}", name(role), which), tier, bytes});
  return all_.size() - 1;
}

Ring SlotList::add_ring(SlotRole role, Tier tier, std::size_t slots, std::size_t bytes) {
  if (slots * bytes == 0) return {};
  const std::size_t first = all_.size();
  for (std::size_t i = 0; i < slots; ++i) {
    add(role, tier, bytes, std::to_string(i));
  }
  return {{first, 0, bytes}, slots};
}

// A record alone is often too small for huge pages. A drive takes a request of 2 MiB from a huge page, but only 1 MiB
// at a time from small pages. The latter holds for all of a queue's memory if some of it has small pages: a drive that
// was measured reached 1.5 GB/s instead of 2.7.
Ring SlotList::add_records(SlotRole role, std::size_t records, std::size_t bytes) {
  if (records * bytes == 0) return {};
  const bool huge = records * bytes >= 2 * huge_page_bytes;
  const std::size_t together = round_up(records * bytes, huge ? huge_page_bytes : 1);
  return {{add(role, Tier::host, together), 0, bytes}, records, true};
}

std::vector<Piece> SlotList::add_pieces(const TilePieces& pieces, const std::vector<Tier>& state,
                                        std::string_view which) {
  std::vector<Piece> by_tile(state.size());
  const auto tiles = static_cast<std::size_t>(std::ranges::count(state, pieces.state_tier));
  if (tiles * pieces.bytes == 0) return by_tile;
  const std::size_t slot = add(pieces.role, pieces.tier, tiles * pieces.bytes, which);
  std::size_t begin = 0;
  for (std::size_t tile = 0; tile < state.size(); ++tile) {
    if (state[tile] != pieces.state_tier) continue;
    by_tile[tile] = {slot, begin, pieces.bytes};
    begin += pieces.bytes;
  }
  return by_tile;
}

void StepRings::restart() {
  for (Ring* ring : {&gradients, &partial, &arriving, &landed, &tile_gradients, &tile_parameters, &tile_directions,
                     &directions, &matrices, &first_regions, &staging}) {
    ring->restart();
  }
}

StepSlots::StepSlots(const CompileInput& input, const Uses& uses)
    : in_(input), residence_(reside(input.placement, input.layout)) {
  const Placement& placement = input.placement;
  for (std::size_t unit = 0; unit < input.model.units.size(); ++unit) {
    const bool all_here = placement.shards == 1 && residence_[unit].parameters == Tier::device;
    is_gathered_per_use_.push_back(!placement.full_parameters && !all_here);
    sums_.push_back(placement.reduction == Reduction::each ? uses.backward_visits(unit) * input.micro_steps : 1);
    add_unit(unit);
    add_tiles(unit);
  }
  if (input.needs_matrices()) matrices_ = home_matrices(input.model, input.layout);
  add_gathered(uses);
  const Needs needed = needs();
  add_rings(needed, longest_chain(input.model, uses));
  if (input.needs_matrices()) add_matrices(needed);
  add_records(needed);
  add_norms();
  add_codes();
  add_memory_of_reductions();
}

std::size_t StepSlots::full_bytes(std::size_t unit) const {
  return in_.layout.units[unit].elements() * in_.width(unit);
}

std::size_t StepSlots::shard_bytes(std::size_t unit) const {
  return in_.layout.units[unit].trained.shard * in_.width_of_sums(unit);
}

std::size_t StepSlots::partial_bytes(std::size_t unit) const {
  return in_.kept(in_.layout.units[unit].trained).shard * sizeof(float);
}

void StepSlots::add_unit(std::size_t unit) {
  const UnitLayout& layout = in_.layout.units[unit];
  const std::string which = std::to_string(unit);
  UnitSlots& slots = units_.emplace_back();
  if (residence_[unit].parameters == Tier::device) {
    const std::size_t elements =
        is_gathered_per_use_[unit] ? in_.kept(layout.trained).shard + in_.kept(layout.frozen).shard : layout.elements();
    slots.parameters = slots_.add(SlotRole::parameters, Tier::device, elements * in_.width(unit), which);
  } else if (residence_[unit].parameters == Tier::host && layout.frozen.shard > 0) {
    slots.frozen = slots_.add(SlotRole::frozen, Tier::host, layout.frozen.shard * in_.width(unit), which);
  }
  if (layout.trained.shard == 0) return;
  if (in_.placement.reduction == Reduction::boundary) {
    slots.gradients = slots_.add(SlotRole::gradients, Tier::device, layout.trained.count() * in_.width(unit), which);
  }
  if (!in_.schedule.update_in_backward || sums_[unit] > 1) {
    slots.reduced = slots_.add(SlotRole::reduced, residence_[unit].gradients, shard_bytes(unit), which);
  }
}

void StepSlots::add_tiles(std::size_t unit) {
  const std::vector<Tier>& state = residence_[unit].state;
  const BlockSizes& sizes = in_.blocks.of(unit);
  const std::string which = std::to_string(unit);
  const std::size_t copied = residence_[unit].parameters == Tier::host ? sizes.parameter : 0;
  UnitSlots& slots = units_[unit];
  slots.state = slots_.add_pieces({SlotRole::state, Tier::device, Tier::device, in_.blocks.state_bytes_on_device(unit)},
                                  state, which);
  slots.blocks = slots_.add_pieces({SlotRole::blocks, Tier::host, Tier::host, sizes.bytes()}, state, which);
  slots.copies = slots_.add_pieces({SlotRole::parameters, Tier::host, Tier::nvme, copied}, state, which);
}

void StepSlots::add_gathered(const Uses& uses) {
  if (std::ranges::none_of(is_gathered_per_use_, [](bool yes) { return yes; })) return;
  std::vector<std::size_t> unit_bytes;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    unit_bytes.push_back(is_gathered_per_use_[unit] ? round_up(full_bytes(unit), gathered_alignment) : 0);
  }
  const Schedule& schedule = in_.schedule;
  const std::size_t needed = bytes_to_gather(in_.model, uses, schedule.prefetch, unit_bytes);
  const std::size_t all = std::accumulate(unit_bytes.begin(), unit_bytes.end(), std::size_t{0});
  const std::size_t bytes = in_.gathered_bytes.value_or(std::clamp(schedule.gathered_bytes, needed, all));
  gathered_ = slots_.add(SlotRole::gathered, Tier::device, bytes);
}

StepSlots::Needs StepSlots::needs() const {
  Needs needs;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    const bool has_parameters = in_.layout.units[unit].elements() > 0;
    needs.first_regions = needs.first_regions || (has_parameters && residence_[unit].parameters == Tier::nvme);
    if (in_.layout.units[unit].trained.shard > 0) add_needs(unit, needs);
  }
  return needs;
}

void StepSlots::add_needs(std::size_t unit, Needs& needs) const {
  const UnitLayout& layout = in_.layout.units[unit];
  const UnitResidence& at = residence_[unit];
  const bool has_home = units_[unit].reduced != none;
  const auto on_drive = static_cast<std::size_t>(std::ranges::count(at.state, Tier::nvme));
  const bool updates_on_host = std::ranges::any_of(at.state, [](Tier tier) { return tier != Tier::device; });
  const bool passes_to_host = updates_on_host && !in_.host_is_device;
  const bool passes_by =
      in_.placement.reduction == Reduction::each && (sums_[unit] > 1 || in_.extra_sum_slots);  // the sum so far
  needs.gradient_bytes = std::max(needs.gradient_bytes, layout.trained.count() * in_.width(unit));
  needs.shard_bytes = std::max(needs.shard_bytes, shard_bytes(unit));
  needs.partial_bytes = std::max(needs.partial_bytes, partial_bytes(unit));
  needs.arriving = needs.arriving || passes_by || at.gradients == Tier::host || !has_home;
  needs.landed = needs.landed || (at.gradients == Tier::host && (passes_by || !has_home));
  needs.records += on_drive;
  auto& [most, second] = needs.records_of_units;
  second = std::max(second, std::min(most, on_drive));
  most = std::max(most, on_drive);
  if (passes_to_host && at.gradients == Tier::device) {
    const std::size_t tile_bytes = layout.tile_elements * in_.width_of_sums(unit);
    needs.tile_gradient_bytes = std::max(needs.tile_gradient_bytes, tile_bytes);
  }
  if (passes_to_host && at.parameters == Tier::device && on_drive > 0 && !in_.blocks.full_records()) {
    needs.tile_parameter_bytes = std::max(needs.tile_parameter_bytes, in_.blocks.of(unit).parameter);
  }
  if (!in_.needs_matrices()) return;
  add_needs_of_matrices(unit, needs);
  if (passes_to_host) {
    needs.tile_directions = std::max(needs.tile_directions, layout.tile_elements * byte_size(DType::bf16));
  }
}

// The directions are the matrices if there is one rank.
void StepSlots::add_needs_of_matrices(std::size_t unit, Needs& needs) const {
  const std::size_t width = byte_size(DType::bf16);
  needs.directions = std::max(needs.directions, in_.layout.units[unit].trained.shard * width);
  if (in_.placement.shards > 1) needs.matrices = std::max(needs.matrices, matrices_[unit].elements * width);
  for (const Tensor& tensor : in_.model.units[unit].tensors) {
    if (tensor.frozen) continue;
    for (const MatrixBlocks& blocks : blocks_of(tensor)) {
      const std::size_t bytes = kernels::workspace_bytes(blocks.shape, !in_.host_is_device);
      needs.workspace = std::max(needs.workspace, bytes);
    }
  }
}

void StepSlots::add_rings(const Needs& needs, std::size_t held_together) {
  const bool mesh = in_.placement.ranks_per_group() > 1 && in_.placement.groups() > 1;
  const auto on_device = [&](SlotRole role, std::size_t slots, std::size_t bytes) {
    return slots_.add_ring(role, Tier::device, slots, bytes);
  };
  const auto on_host = [&](SlotRole role, std::size_t slots, std::size_t bytes) {
    return slots_.add_ring(role, Tier::host, slots, bytes);
  };
  if (in_.placement.reduction == Reduction::each) {
    rings.gradients = on_device(SlotRole::gradients, std::max(pieces_in_flight, held_together), needs.gradient_bytes);
  }
  if (mesh) rings.partial = on_device(SlotRole::partial, pieces_in_flight, needs.partial_bytes);
  if (needs.arriving) rings.arriving = on_device(SlotRole::arriving, pieces_in_flight, needs.shard_bytes);
  if (needs.landed) rings.landed = on_host(SlotRole::landed, pieces_in_flight, needs.shard_bytes);
  rings.tile_gradients = on_host(SlotRole::tile_gradients, tiles_on_their_way, needs.tile_gradient_bytes);
  rings.tile_parameters = on_host(SlotRole::tile_parameters, tiles_on_their_way, needs.tile_parameter_bytes);
}

void StepSlots::add_matrices(const Needs& needs) {
  const std::size_t units = updates_at_once();
  rings.tile_directions =
      slots_.add_ring(SlotRole::tile_directions, Tier::host, tiles_on_their_way, needs.tile_directions);
  rings.directions = slots_.add_ring(SlotRole::directions, Tier::device, units, needs.directions);
  rings.matrices = slots_.add_ring(SlotRole::matrices, Tier::device, units, needs.matrices);
  workspace_ = {slots_.add(SlotRole::workspace, Tier::device, needs.workspace), 0, needs.workspace};
}

// A rule of whole matrices keeps the records of all units that it updates at once.
void StepSlots::add_records(const Needs& needs) {
  const RecordSizes& sizes = in_.blocks.records();
  const std::size_t kept = std::min(in_.schedule.kept_records, needs.records);
  const auto& [most, second] = needs.records_of_units;
  const std::size_t at_once = in_.needs_matrices() ? most + (updates_at_once() > 1 ? second : 0) : 1;
  const std::size_t staged = std::min(std::max(in_.schedule.staging_slots, at_once), needs.records - kept);
  if (needs.first_regions) {
    rings.first_regions = slots_.add_records(SlotRole::first_regions, first_regions_ahead, sizes.parameter_record());
  }
  rings.staging = slots_.add_records(SlotRole::staging, staged, sizes.record);
  const Ring stay = slots_.add_records(SlotRole::kept, kept, sizes.record);
  for (std::size_t i = 0; i < stay.slots(); ++i) {
    kept_.push_back(stay.at(i));
  }
  if (in_.mirror && needs.records > 0) slots_.add_records(SlotRole::mirror, mirrored_in_flight, sizes.record);
}

void StepSlots::add_norms() {
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    if (shard_bytes(unit) == 0) continue;
    add_norm(residence_[unit].gradients);  // gradients on the host count too: off plan, their sum may change there
    if (is_normed_on_its_way(unit)) add_norm(Tier::device);
  }
}

void StepSlots::add_norm(Tier tier) {
  Piece& norm = norms_[static_cast<std::size_t>(tier)];
  constexpr std::size_t bytes = sizeof(kernels::ExactSum);
  if (!norm.exists()) norm = {slots_.add(SlotRole::norm, tier, bytes, name(tier)), 0, bytes};
}

// Each of the two lanes has its own, for one collective at a time.
void StepSlots::add_codes() {
  std::size_t gathered = 0;
  std::size_t reduced = 0;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    const UnitLayout& layout = in_.layout.units[unit];
    for (const Section* section : {&layout.trained, &layout.frozen}) {
      if (is_gathered_per_use_[unit]) gathered = std::max(gathered, gather_codes(unit, *section).memory.bytes);
    }
    for (const Ranks ranks : {Ranks::shard_group, Ranks::replica_group}) {
      reduced = std::max(reduced, reduce_codes(unit, ranks).memory.bytes);
    }
  }
  if (reduced > 0) reduce_codes_ = slots_.add(SlotRole::reduce_codes, Tier::device, reduced);
  if (gathered > 0) gather_codes_ = slots_.add(SlotRole::gather_codes, Tier::device, gathered);
}

// Both groups of a mesh reduce in one lane, one after the other, so they share it.
void StepSlots::add_memory_of_reductions() {
  const kernels::ReductionMemory memory = memory_of_reductions(in_);
  if (memory.received > 0) slots_.add(SlotRole::received, Tier::device, memory.received);
  if (memory.sums > 0) slots_.add(SlotRole::host_sums, Tier::device, memory.sums);
}

Codes StepSlots::gather_codes(std::size_t unit, const Section& section) const {
  if (!in_.gathers_codes(unit)) return {};
  Codes codes = codes_of_gather(in_.wire, in_.kept(section));
  if (codes.memory.bytes > 0) codes.memory.slot = gather_codes_;
  return codes;
}

Codes StepSlots::reduce_codes(std::size_t unit, Ranks ranks) const {
  Codes codes = codes_of_reduction(in_.wire, in_.placement, in_.layout.units[unit], ranks);
  if (codes.memory.bytes > 0) codes.memory.slot = reduce_codes_;
  return codes;
}

std::vector<Home> StepSlots::homes() const {
  std::vector<Home> homes;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    add_kept_parameters(unit, homes);
    for (std::size_t tile = 0; tile < in_.layout.units[unit].tiles.size(); ++tile) {
      homes.push_back(home_of_tile(unit, tile));
    }
    add_frozen_tiles(unit, homes);
  }
  return homes;
}

// Adds the homes of parameters that are kept apart from the tiles' blocks and records.
void StepSlots::add_kept_parameters(std::size_t unit, std::vector<Home>& homes) const {
  const UnitLayout& layout = in_.layout.units[unit];
  const UnitSlots& slots = units_[unit];
  const auto add = [&](const Range& range, std::size_t slot, std::size_t begin) {
    if (range.count == 0 || slot == none) return;
    homes.push_back(
        {.unit = unit, .range = range, .parameters = {slot, begin * in_.width(unit), range.count * in_.width(unit)}});
  };
  const Range trained = layout.trained.shard_range(in_.rank_in_shard_group);
  const Range frozen = layout.frozen.shard_range(in_.rank_in_shard_group);
  if (is_gathered_per_use_[unit]) {
    const Range kept = in_.kept_range(layout.trained);
    add(trained, slots.parameters, trained.first - kept.first);
    add(frozen, slots.parameters, kept.count + frozen.first - in_.kept_range(layout.frozen).first);
  } else {
    add({0, layout.elements()}, slots.parameters, 0);
  }
  add(frozen, slots.frozen, 0);
}

// Where parameters are on a drive, those that no step changes have records of their own.
void StepSlots::add_frozen_tiles(std::size_t unit, std::vector<Home>& homes) const {
  if (residence_[unit].parameters != Tier::nvme) return;
  const UnitLayout& layout = in_.layout.units[unit];
  for (std::size_t i = 0; i < layout.frozen_tiles.size(); ++i) {
    const std::size_t tile = layout.tiles.size() + i;
    homes.push_back({.unit = unit,
                     .tile = tile,
                     .range = layout.tile_range(in_.rank_in_shard_group, tile),
                     .on_drive = true,
                     .frozen = true});
  }
}

Home StepSlots::home_of_tile(std::size_t unit, std::size_t tile) const {
  const UnitSlots& slots = units_[unit];
  const BlockSizes& sizes = in_.blocks.of(unit);
  Home home{.unit = unit, .tile = tile, .range = in_.layout.units[unit].tile_range(in_.rank_in_shard_group, tile)};
  const std::size_t parameter_bytes = home.range.count * in_.width(unit);
  switch (residence_[unit].state[tile]) {
    case Tier::device: home.state = slots.state[tile]; break;
    case Tier::host:
      home.parameters = slots.blocks[tile].part(0, parameter_bytes);
      home.state = slots.blocks[tile].part(sizes.parameter, sizes.state);
      break;
    case Tier::nvme:
      home.on_drive = true;
      if (slots.copies[tile].exists()) home.parameters = slots.copies[tile].part(0, parameter_bytes);
      break;
  }
  return home;
}

}  // namespace ballast
