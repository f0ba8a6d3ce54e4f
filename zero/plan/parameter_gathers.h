// Full parameters on their way to the device.
#pragma once

#include <ballast/error.h>

#include <algorithm>
#include <optional>

#include "kernels/runtime/sizes.h"
#include "zero/plan/record_stream.h"

namespace ballast {

// The units that are gathered at one time, and their position in the memory for them. The order of all uses is known,
// so Belady's rule decides: the unit whose next use is farthest away is dropped. Off plan it is the one whose last use is.
class GatheredUnits {
 public:
  GatheredUnits(std::size_t bytes, const Uses& uses, bool off_plan) : bytes_(bytes), uses_(uses), off_plan_(off_plan) {}

  std::optional<GatheredUnit> find(std::size_t unit) const {  // none: it is not gathered
    const auto extent = std::ranges::find(extents_, unit, &GatheredUnit::unit);
    if (extent == extents_.end()) return {};
    return *extent;
  }

  // Makes room for a unit that is used at `position`, by dropping units that are used later. Drops nothing and returns
  // false if the units that are used between `now` and then leave no room.
  bool make_room(std::size_t unit, std::size_t bytes, std::size_t now, std::size_t position) {
    Extents extents = extents_;
    while (true) {
      if (const auto gap = first_gap(extents, bytes)) {
        const bool exact = uses_.trace()[position % uses_.trace().size()].exact;
        extents.insert(gap->second, {unit, gap->first, gap->first + bytes, exact, none});
        extents_ = std::move(extents);
        return true;
      }
      const auto next_use = [&](const GatheredUnit& extent) {
        const std::size_t next = uses_.next(extent.unit, now);
        return off_plan_ && next >= uses_.trace().size() ? none : next;
      };
      const auto farthest = std::ranges::max_element(
          extents, {}, [&](const GatheredUnit& extent) { return std::pair(next_use(extent), none - extent.order); });
      if (farthest == extents.end() || next_use(*farthest) <= position) return false;
      extents.erase(farthest);
    }
  }

  // Whether there is room while all units stay.
  bool has_gap(std::size_t bytes) const { return first_gap(extents_, bytes).has_value(); }

  void drop(std::size_t unit) {
    std::erase_if(extents_, [&](const GatheredUnit& extent) { return extent.unit == unit; });
  }

  void clear() { extents_.clear(); }

  void take_over(const std::vector<GatheredUnit>& by_last_use) {
    extents_ = by_last_use;
    for (std::size_t i = 0; i < extents_.size(); ++i)
      extents_[i].order = i;
    std::ranges::sort(extents_, {}, [](const GatheredUnit& each) { return std::pair(each.begin, each.end); });
  }

  std::vector<GatheredUnit> by_last_use(std::span<const Visit> last) const {
    std::vector<GatheredUnit> found = extents_;
    for (GatheredUnit& each : found) {
      if (std::ranges::find(last, each.unit, &Visit::unit) != last.end()) each.order = none;
    }
    std::ranges::stable_sort(found, {}, &GatheredUnit::order);
    return found;
  }

 private:
  using Extents = std::vector<GatheredUnit>;

  // The beginning of the first gap of this size, and the extent after it.
  std::optional<std::pair<std::size_t, Extents::const_iterator>> first_gap(const Extents& extents,
                                                                           std::size_t bytes) const {
    std::size_t begin = 0;
    for (auto extent = extents.begin(); extent != extents.end(); ++extent) {
      if (begin + bytes <= extent->begin) return {{begin, extent}};
      begin = round_up(extent->end, gathered_alignment);
    }
    if (begin + bytes <= bytes_) return {{begin, extents.end()}};
    return {};
  }

  std::size_t bytes_;
  const Uses& uses_;
  bool off_plan_;
  Extents extents_;  // sorted by their place in memory
};

// Emits the operations that bring full parameters to the device, reads of records, uploads and gathers; knows where they are.
class ParameterGathers {
 public:
  // `records` says which write a read of the same record has to wait for.
  ParameterGathers(CompileContext& context, const RecordStream& records)
      : context_(context),
        records_(records),
        gathered_(context.slots.gathered_bytes(), context.uses, context.off_plan) {}

  Piece full(std::size_t unit) const {  // a unit's parameters, if they are gathered
    const std::size_t bytes = context_.slots.full_bytes(unit);
    if (!context_.slots.is_gathered_per_use(unit)) return {context_.slots.of(unit).parameters, 0, bytes};
    return {context_.slots.gathered_slot(), gathered_.find(unit)->begin, bytes};
  }

  // What an update changes of the parameters that the device keeps: a range of this rank's shard.
  Piece kept_range(std::size_t unit, const Range& in_shard) const {
    const std::size_t width = context_.width(unit);
    const auto [first, count] = in_shard;
    return kept_shard(unit, context_.layout(unit).trained).part(first * width, count * width);
  }

  // Gathers a unit for its use at `position`, unless it is gathered already. Returns false if the units that are used
  // between `now` and then leave no memory. This unit is one of them if only one of its two uses is exact.
  bool ensure_gathered(std::size_t unit, std::size_t now, std::size_t position) {
    if (!context_.slots.is_gathered_per_use(unit)) return true;
    const Visit& visit = context_.trace()[position % context_.trace().size()];
    if (const auto gathered = gathered_.find(unit)) {
      if (gathered->exact == visit.exact) return true;
      if (context_.uses.next(unit, now) < position) return false;
      gathered_.drop(unit);
    }
    if (!gathered_.make_room(unit, context_.slots.full_bytes(unit), now, position)) return false;
    gather(unit, visit);
    return true;
  }

  // Whether a unit is gathered, or can be while all others stay.
  bool has_spare_memory(std::size_t unit) const {
    return !context_.slots.is_gathered_per_use(unit) || gathered_.find(unit) ||
           gathered_.has_gap(context_.slots.full_bytes(unit));
  }

  // Gathers the units that are held together from `position` on, and drops others if necessary. Throws B2004 if they do
  // not fit.
  void ensure_chain_gathered(std::size_t position) {
    const std::size_t end = context_.uses.end_of_chain(position);
    const auto gather_all = [&] {
      for (std::size_t i = position; i < end; ++i) {
        if (!ensure_gathered(context_.trace()[i].unit, position, i)) return false;
      }
      return true;
    };
    if (gather_all()) return;
    gathered_.clear();
    require(gather_all(), Code::memory_budget, [&] {
      return Problem{
          .what = "cannot gather the parameters: the memory for gathered parameters is too small",
          .where = "unit " + context_.input.model.units[context_.trace()[end - 1].unit].name,
          .needed = human_bytes(chain_bytes(position)),
          .available = human_bytes(context_.slots.gathered_bytes()),
          .remedy = "Give gathered parameters more memory (keep_gathered=), or cut the model into smaller units."};
    });
  }

  // Prefetches into the next micro-step, but not into the next step: parameters change before that.
  void prefetch(std::size_t micro_step, std::size_t position) {
    const CompileInput& in = context_.input;
    const Trace& trace = context_.trace();
    const std::size_t known = micro_step + 1 < in.micro_steps ? 2 * trace.size() : trace.size();
    const std::size_t end = context_.uses.end_of_units(position, in.schedule.prefetch, known);
    for (std::size_t i = position + 1; i < end; i = context_.uses.end_of_row(i)) {
      if (!ensure_gathered(trace[i % trace.size()].unit, position, i)) return;
    }
  }

  // Gathers what is kept of a unit's parameters beyond this rank's shard, which all ranks need each other's updates for.
  void gather_kept(std::size_t unit) {
    const Section& trained = context_.layout(unit).trained;
    if (context_.slots.is_gathered_per_use(unit)) return gather_replica(unit, trained);
    if (trained.shard == 0 || trained.shards == 1) return;
    context_.builder.add({.kind = OpKind::gather,
                          .lane = Lane::gather,
                          .unit = unit,
                          .parts = trained.parts,
                          .from = shard(unit, trained),
                          .to = full(unit, trained.all())});
  }

  void gather_kept_frozen(std::size_t unit) {  // once: they do not change
    if (context_.slots.is_gathered_per_use(unit)) gather_replica(unit, context_.layout(unit).frozen);
  }

  void drop(std::size_t unit) { gathered_.drop(unit); }  // its parameters have changed, or soon will
  void drop_all() { gathered_.clear(); }
  GatheredUnits& gathered() { return gathered_; }

 private:
  // A range of the full parameters. Of a section: this rank's shard in them; what the device keeps between uses, and this rank's
  // shard in that.
  Piece full(std::size_t unit, const Range& range) const {
    const std::size_t width = context_.width(unit);
    return full(unit).part(range.first * width, range.count * width);
  }

  Piece shard(std::size_t unit, const Section& section) const {
    return full(unit, section.shard_range(context_.input.rank_in_shard_group));
  }

  Piece kept(std::size_t unit, const Section& section) const {
    if (!context_.slots.is_gathered_per_use(unit)) return shard(unit, section);
    const CompileInput& in = context_.input;
    const std::size_t width = context_.width(unit);
    const std::size_t before = section.first == 0 ? 0 : in.kept(context_.layout(unit).trained).shard;
    return {context_.slots.of(unit).parameters, before * width, in.kept(section).shard * width};
  }

  Piece kept_shard(std::size_t unit, const Section& section) const {
    const CompileInput& in = context_.input;
    const std::size_t width = context_.width(unit);
    const std::size_t before = section.shard_range(in.rank_in_shard_group).first - in.kept_range(section).first;
    return kept(unit, section).part(before * width, section.shard * width);
  }

  void gather(std::size_t unit, const Visit& visit) {
    if (gathers_from_host(context_.input, context_.residence(unit), unit)) return gather_from_host(unit, visit.phase);
    const bool on_device = context_.residence(unit).parameters == Tier::device;
    if (!on_device) upload_shard(unit, visit.phase);
    for (const Section& section : {context_.layout(unit).trained, context_.layout(unit).frozen}) {
      if (section.shard == 0 || section.shards == 1) continue;
      context_.builder.add({.kind = OpKind::gather,
                            .lane = Lane::gather,
                            .phase = visit.phase,
                            .unit = unit,
                            .parts = section.parts,
                            .from = on_device ? kept(unit, section) : shard(unit, section),
                            .to = full(unit, section.all()),
                            .codes = visit.exact ? Codes{} : context_.slots.gather_codes(unit, section)});
    }
  }

  void gather_from_host(std::size_t unit, Phase phase) {
    const UnitSlots& slots = context_.slots.of(unit);
    const auto add = [&](const Section& section, const Piece& kept) {
      context_.builder.add({.kind = OpKind::gather,
                            .lane = Lane::upload,
                            .phase = phase,
                            .unit = unit,
                            .from = kept.part(0, section.shard * context_.width(unit)),
                            .to = full(unit, section.all())});
    };
    const UnitLayout& layout = context_.layout(unit);
    if (layout.trained.shard > 0) add(layout.trained, slots.host_parameters.front());
    if (layout.frozen.shard > 0) add(layout.frozen, {slots.frozen, 0, 0});
  }

  // The ranks with the same position in their groups gather each other's shards, in the lane of the reductions, because both
  // have the same groups of ranks.
  void gather_replica(std::size_t unit, const Section& section) {
    if (context_.input.placement.parameter_replicas == 1 || section.shard == 0) return;
    context_.builder.add({.kind = OpKind::gather,
                          .lane = Lane::reduce,
                          .unit = unit,
                          .ranks = Ranks::replica_group,
                          .from = kept_shard(unit, section),
                          .to = kept(unit, section)});
  }

  // Uploads this rank's shard from the host, or from records, to its part of the full parameters.
  void upload_shard(std::size_t unit, Phase phase) {
    const UnitLayout& layout = context_.layout(unit);
    const bool on_drive = context_.residence(unit).parameters == Tier::nvme;
    const std::size_t tiles = layout.tiles.size() + (on_drive ? layout.frozen_tiles.size() : 0);
    for (std::size_t tile = 0; tile < tiles;) {
      tile += on_drive ? upload_record(unit, tile, phase) : upload_tiles(unit, tile, phase);
    }
    if (on_drive || layout.frozen.shard == 0) return;
    const Piece frozen{context_.slots.of(unit).frozen, 0, layout.frozen.shard * context_.width(unit)};
    context_.copy(OpKind::upload, phase, {unit}, frozen, shard(unit, layout.frozen));
  }

  // Return how many tiles were uploaded, from `tile` on: one from a record, or neighbours in the host's memory.
  std::size_t upload_record(std::size_t unit, std::size_t tile, Phase phase) {
    const Piece record = context_.slots.rings.first_regions.next();
    fetch({unit, tile}, phase, record);
    upload({unit, tile}, phase, record.part(context_.input.blocks.records().payload, record.bytes));
    return 1;
  }

  std::size_t upload_tiles(std::size_t unit, std::size_t tile, Phase phase) {
    const std::vector<Piece>& from = context_.slots.of(unit).host_parameters;
    Piece together = from[tile];
    std::size_t end = tile + 1;
    for (; end < from.size() && end - tile < StepSlots::tiles_at_once; ++end) {
      if (from[end].slot != together.slot || from[end].begin != together.end()) break;
      together.bytes += from[end].bytes;
    }
    upload({unit, tile, end - tile}, phase, together);
    return end - tile;
  }

  void upload(const Tiles& tiles, Phase phase, const Piece& from) {
    const UnitLayout& layout = context_.layout(tiles.unit);
    const std::size_t rank = context_.input.rank_in_shard_group;
    const std::size_t first = layout.tile_range(rank, tiles.first).first;
    const Range range{first, layout.tile_range(rank, tiles.first + tiles.count - 1).end() - first};
    context_.copy(OpKind::upload, phase, tiles, from.part(0, range.count * context_.width(tiles.unit)),
                  full(tiles.unit, range));
  }

  // A record can be read as soon as it is written. Its commit need not be waited for.
  void fetch(const TileName& name, Phase phase, const Piece& to) {
    context_.builder.add({.kind = OpKind::read_first,
                          .lane = Lane::fetch,
                          .phase = phase,
                          .unit = name.unit,
                          .tile = name.tile,
                          .to = to},
                         records_.written(name));
  }

  std::size_t chain_bytes(std::size_t position) const {
    std::size_t bytes = 0;
    for (std::size_t i = position; i < context_.uses.end_of_chain(position); ++i) {
      const std::size_t unit = context_.trace()[i].unit;
      if (context_.slots.is_gathered_per_use(unit)) bytes += context_.slots.full_bytes(unit);
    }
    return bytes;
  }

  CompileContext& context_;
  const RecordStream& records_;
  GatheredUnits gathered_;
};

}  // namespace ballast
