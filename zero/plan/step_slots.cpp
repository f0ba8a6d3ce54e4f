#include "zero/plan/step_slots.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/exact_sum_math.h"
#include "kernels/runtime/host_pages.h"
#include "kernels/runtime/round_up.h"

namespace ballast {
namespace {

constexpr std::size_t pieces_in_flight = 2;     // one is filled while the other is used
constexpr std::size_t tiles_on_their_way = 4;   // from the device to updates on the host
constexpr std::size_t first_regions_ahead = 8;  // read for the gathers that come next

}  // namespace

StepSlots::StepSlots(const CompileInput& input, const Trace& trace, const Uses& uses)
    : in_(input), residence_(reside(input.placement, input.layout)) {
  const Placement& placement = input.placement;
  for (std::size_t unit = 0; unit < input.model.units.size(); ++unit) {
    const bool all_here = placement.shards == 1 && residence_[unit].parameters == Tier::device;
    comes_and_goes_.push_back(!placement.whole_parameters && !all_here);
    sums_.push_back(placement.reduction == Reduction::each ? uses.backward_visits(unit) * input.micro_steps : 1);
    add_unit(unit);
    add_tiles(unit);
  }
  add_gathered(trace, uses);
  add_rings(longest_chain(trace, uses));
  add_norms();
}

std::size_t StepSlots::add(std::string name, Tier tier, std::size_t bytes, SlotRole role) {
  all_.push_back({std::move(name), tier, bytes, role});
  return all_.size() - 1;
}

Ring StepSlots::add_ring(std::string_view name, Tier tier, std::size_t slots, std::size_t bytes) {
  if (slots * bytes == 0) return {};
  const std::size_t first = all_.size();
  for (std::size_t i = 0; i < slots; ++i) {
    add(fmt::format("{}.{}", name, i), tier, bytes);
  }
  return {{first, 0, bytes}, slots};
}

// All of them in one slot of whole huge pages. A record alone is often too small for those, and a drive takes a request of
// 2 MiB from one, but 1 MiB at a time from small pages, and from all of a queue's memory that has some at its end: 1.5 GB/s
// instead of 2.7 on the drive that this was seen on.
Ring StepSlots::add_records(std::string_view name, std::size_t records, std::size_t bytes) {
  if (records * bytes == 0) return {};
  const bool huge = records * bytes >= 2 * huge_page_bytes;
  const std::size_t together = round_up(records * bytes, huge ? huge_page_bytes : 1);
  return {{add(std::string(name), Tier::host, together), 0, bytes}, records, true};
}

std::size_t StepSlots::whole_bytes(std::size_t unit) const {
  return in_.layout.units[unit].elements() * byte_size(in_.model.units[unit].dtype);
}

std::size_t StepSlots::shard_bytes(std::size_t unit) const {
  return in_.layout.units[unit].trained.shard * sizeof(float);
}

void StepSlots::add_unit(std::size_t unit) {
  const UnitLayout& layout = in_.layout.units[unit];
  const std::size_t width = byte_size(in_.model.units[unit].dtype);
  const Tier parameters = residence_[unit].parameters;
  UnitSlots& slots = units_.emplace_back();
  if (parameters == Tier::device) {
    const std::size_t elements = comes_and_goes_[unit] ? layout.trained.shard + layout.frozen.shard : layout.elements();
    slots.parameters = add(fmt::format("parameters.{}", unit), Tier::device, elements * width);
  } else if (layout.frozen.shard > 0) {  // frozen parameters are in no record, so they stay on the host
    slots.frozen = add(fmt::format("frozen.{}", unit), Tier::host, layout.frozen.shard * width);
  }
  if (layout.trained.shard == 0) return;
  if (in_.placement.reduction == Reduction::boundary) {
    slots.gradients = add(fmt::format("gradients.{}", unit), Tier::device, layout.trained.count() * width);
  }
  if (!in_.schedule.update_in_backward || sums_[unit] > 1) {
    slots.reduced =
        add(fmt::format("reduced.{}", unit), residence_[unit].gradients, shard_bytes(unit), SlotRole::reduced);
  }
}

void StepSlots::add_tiles(std::size_t unit) {
  const std::vector<Tier>& tiers = residence_[unit].state;
  const BlockSizes& sizes = in_.blocks.of(unit);
  const auto place = [&](std::string_view name, Tier slot_tier, Tier tier, std::size_t bytes) {
    std::vector<Piece> pieces(tiers.size());
    const auto tiles = static_cast<std::size_t>(std::ranges::count(tiers, tier));
    if (tiles * bytes == 0) return pieces;
    const std::size_t slot = add(fmt::format("{}.{}", name, unit), slot_tier, tiles * bytes);
    std::size_t begin = 0;
    for (std::size_t tile = 0; tile < tiers.size(); ++tile) {
      if (tiers[tile] != tier) continue;
      pieces[tile] = {slot, begin, bytes};
      begin += bytes;
    }
    return pieces;
  };
  const bool copied = residence_[unit].parameters == Tier::host;
  units_[unit].state = place("state", Tier::device, Tier::device, sizes.state);
  units_[unit].blocks = place("blocks", Tier::host, Tier::host, sizes.bytes());
  units_[unit].copies = place("parameters", Tier::host, Tier::nvme, copied ? sizes.parameter : 0);
}

// How many units' memory is held at once, at most: also if the trainer leaves the trace, for whichever unit.
std::size_t StepSlots::longest_chain(const Trace& trace, const Uses& uses) const {
  std::size_t longest = 1;
  for (std::size_t i = 0; i < trace.size(); ++i) {
    longest = std::max(longest, uses.end_of_chain(i) - i);
  }
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    longest = std::max(longest, visits_of(in_.model, unit, Phase::forward).size());
  }
  return longest;
}

std::size_t StepSlots::bytes_gathered(const std::set<std::size_t>& units) const {
  std::size_t bytes = 0;
  for (const std::size_t unit : units) {
    if (comes_and_goes_[unit]) bytes += whole_bytes(unit);
  }
  return bytes;
}

// Enough for the units of any prefetch + 1 visits in a row, and for those that are held together, be they in the trace or
// not.
std::size_t StepSlots::bytes_for_prefetch(const Trace& trace, const Uses& uses) const {
  std::size_t most = 0;
  for (std::size_t i = 0; i < trace.size(); ++i) {
    const std::size_t end = std::max(i + in_.schedule.prefetch + 1, uses.end_of_chain(i));
    std::set<std::size_t> units;
    for (std::size_t j = i; j < std::min(end, trace.size()); ++j) {
      units.insert(trace[j].unit);
    }
    most = std::max(most, bytes_gathered(units));
  }
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    std::set<std::size_t> units;
    for (const Visit& visit : visits_of(in_.model, unit, Phase::forward)) {
      units.insert(visit.unit);
    }
    most = std::max(most, bytes_gathered(units));
  }
  return most;
}

void StepSlots::add_gathered(const Trace& trace, const Uses& uses) {
  if (std::ranges::none_of(comes_and_goes_, [](bool yes) { return yes; })) return;
  const std::size_t asked = in_.schedule.gathered_bytes;
  const std::size_t bytes = asked > 0 ? asked : bytes_for_prefetch(trace, uses);
  gathered_ = add("gathered", Tier::device, bytes, SlotRole::gathered);
}

void StepSlots::add_norms() {
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    const Tier tier = residence_[unit].gradients;
    Piece& norm = norms_[static_cast<std::size_t>(tier)];
    if (norm.exists() || shard_bytes(unit) == 0) continue;
    constexpr std::size_t bytes = sizeof(kernels::ExactSum);
    norm = {add(fmt::format("norm.{}", name(tier)), tier, bytes), 0, bytes};
  }
}

StepSlots::Needs StepSlots::needs() const {
  Needs needs;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    const UnitLayout& layout = in_.layout.units[unit];
    const UnitResidence& at = residence_[unit];
    if (layout.trained.shard == 0) continue;
    const auto on_drive = static_cast<std::size_t>(std::ranges::count(at.state, Tier::nvme));
    const bool updates_on_host = std::ranges::any_of(at.state, [](Tier tier) { return tier != Tier::device; });
    const bool passes_to_host = updates_on_host && !in_.host_is_device;
    const bool passes_by =
        in_.placement.reduction == Reduction::each && (sums_[unit] > 1 || in_.sums_pass_by);  // what is summed so far
    needs.gradient_bytes =
        std::max(needs.gradient_bytes, layout.trained.count() * byte_size(in_.model.units[unit].dtype));
    needs.shard_bytes = std::max(needs.shard_bytes, shard_bytes(unit));
    needs.arriving = needs.arriving || passes_by || at.gradients == Tier::host || units_[unit].reduced == none;
    needs.landed = needs.landed || (at.gradients == Tier::host && (passes_by || units_[unit].reduced == none));
    needs.first_regions = needs.first_regions || at.parameters == Tier::nvme;
    needs.records += on_drive;
    if (passes_to_host && at.gradients == Tier::device) {
      needs.tile_gradient_bytes = std::max(needs.tile_gradient_bytes, layout.tile_elements * sizeof(float));
    }
    if (passes_to_host && at.parameters == Tier::device && on_drive > 0 && !in_.blocks.whole_records()) {
      needs.tile_parameter_bytes = std::max(needs.tile_parameter_bytes, in_.blocks.of(unit).parameter);
    }
  }
  return needs;
}

void StepSlots::add_rings(std::size_t held_together) {
  const Needs needs = this->needs();
  const bool mesh = in_.placement.shards > 1 && in_.placement.replicas > 1;
  const RecordSizes& records = in_.blocks.records();
  const std::size_t kept_records = std::min(in_.schedule.kept_records, needs.records);
  const std::size_t staged = std::min(in_.schedule.staging_slots, needs.records - kept_records);
  if (in_.placement.reduction == Reduction::each) {
    gradients = add_ring("gradients", Tier::device, std::max(pieces_in_flight, held_together), needs.gradient_bytes);
  }
  if (mesh) partial = add_ring("partial", Tier::device, pieces_in_flight, needs.shard_bytes);
  if (needs.arriving) arriving = add_ring("arriving", Tier::device, pieces_in_flight, needs.shard_bytes);
  if (needs.landed) landed = add_ring("landed", Tier::host, pieces_in_flight, needs.shard_bytes);
  tile_gradients = add_ring("tile", Tier::host, tiles_on_their_way, needs.tile_gradient_bytes);
  tile_parameters = add_ring("tile_parameter", Tier::host, tiles_on_their_way, needs.tile_parameter_bytes);
  if (needs.first_regions) first_regions = add_records("first", first_regions_ahead, records.first_record);
  staging = add_records("staging", staged, records.record);
  const Ring stay = add_records("kept", kept_records, records.record);
  for (std::size_t i = 0; i < stay.slots(); ++i) {
    kept.push_back(stay.at(i));
  }
}

void StepSlots::restart() {
  for (Ring* ring :
       {&gradients, &partial, &arriving, &landed, &tile_gradients, &tile_parameters, &first_regions, &staging}) {
    ring->restart();
  }
}

}  // namespace ballast
