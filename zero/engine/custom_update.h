// Updates that the trainer makes itself, after a step's decision and before the operations that follow from it.
#pragma once

#include <ballast/error.h>

#include <set>
#include <utility>

#include "zero/engine/scheduler.h"
#include "zero/engine/slots.h"

namespace ballast {

// The updates of one step.
class CustomUpdate {
 public:
  // All of it outlives this.
  CustomUpdate(const CompiledPlan& plan, const Slots& slots, Scheduler& scheduler)
      : plan_(plan), slots_(slots), scheduler_(scheduler) {}

  void run(const TrainerUpdate& update) const {
    const float factor = scheduler_.run().numbers.gradient_factor;
    const auto [kept, passing] = updates();
    if (!kept.empty() || passing.empty()) update({kept_tiles(kept), factor, passing.empty()});
    for (const std::size_t position : passing) {
      while (scheduler_.position() < position)
        scheduler_.issue_next();
      scheduler_.wait_for_inputs_of_next();
      std::vector<SummedTile> tiles;
      add_tiles(op(position), tiles);
      update({tiles, factor, position == passing.back()});
    }
  }

 private:
  // The updates in the rest of the list, by their positions in the list.
  struct Updates {
    std::vector<std::size_t> kept;     // tiles that memory keeps
    std::vector<std::size_t> passing;  // tiles that operations of the list bring to memory
  };

  // A tile passes through memory if it is written to a drive, or if its parameter, which is the master, is a copy that was
  // downloaded.
  Updates updates() const {
    const std::vector<Op>& list = scheduler_.list();
    std::set<std::pair<std::size_t, std::size_t>> on_drive;
    for (const Op& op : list) {
      if (op.kind == OpKind::write) on_drive.insert({op.unit, op.tile});
    }
    Updates updates;
    Piece downloaded;
    for (std::size_t position = scheduler_.position(); position < list.size(); ++position) {
      const Op& op = list[position];
      if (op.kind == OpKind::download) downloaded = op.to;
      if (op.kind != OpKind::update) continue;
      const bool passes = on_drive.contains({op.unit, op.tile}) || (downloaded.exists() && downloaded == op.to);
      (passes ? updates.passing : updates.kept).push_back(position);
    }
    return updates;
  }

  // Gradients on the device that are updated on the host are copied there first; the trainer gets the original.
  std::vector<SummedTile> kept_tiles(std::span<const std::size_t> updates) const {
    std::vector<SummedTile> tiles;
    std::size_t position = scheduler_.position();
    for (const std::size_t update : updates) {
      const Op* copy = nullptr;
      for (; position < update; ++position) {
        if (op(position).kind == OpKind::download) copy = &op(position);
      }
      Op with_original = op(update);
      if (copy != nullptr && copy->to == with_original.from) with_original.from = copy->from;
      add_tiles(with_original, tiles);
    }
    return tiles;
  }

  void add_tiles(const Op& update, std::vector<SummedTile>& tiles) const {
    for (std::size_t i = 0; i < update.tiles; ++i)
      tiles.push_back(summed_tile(part_on_tile(plan_.input(), update, update.tile + i)));
  }

  // The parts of a unit in a range of this rank's shard.
  std::vector<TilePart> parts_of(std::size_t number, const Range& in_shard) const {
    const Unit& unit = plan_.model().units[number];
    const UnitLayout& layout = plan_.layout().units[number];
    std::vector<TilePart> parts;
    for (const TensorPart& part :
         tensors_in(unit, layout, layout.trained, plan_.input().rank_in_shard_group, in_shard)) {
      parts.push_back({part.tensor, unit.tensors[part.tensor].group, part.range, part.in_shard - in_shard.first});
    }
    return parts;
  }

  SummedTile summed_tile(const Op& update) const {
    const UnitLayout& layout = plan_.layout().units[update.unit];
    const Range range = layout.tile_range(plan_.input().rank_in_shard_group, update.tile);
    const TileMemory state = plan_.blocks().state(update.unit, update.tile).tile(slots_.data(update.state));
    const bool is_master = state.parameter_dtype == DType::fp32;  // the parameter
    return {.unit = update.unit,
            .range = range,
            .parts = parts_of(update.unit, layout.tiles[update.tile]),
            .gradients = slots_.view(update.from, plan_.input().dtype_of_sums(update.unit)),
            .masters = {is_master ? slots_.data(update.to) : state.master, range.count, DType::fp32},
            .own = state.own,
            .gradients_on_gpu = slots_.on_gpu(update.from),
            .masters_on_gpu = slots_.on_gpu(is_master ? update.to : update.state)};
  }

  const Op& op(std::size_t position) const { return scheduler_.list()[position]; }

  const CompiledPlan& plan_;
  const Slots& slots_;
  Scheduler& scheduler_;
};

// Called at the agreement, by the trainer's thread: issues it, and calls `update` unless the step is skipped: once for all tiles
// in memory, and then for each other tile, when the list has brought it there. The list's updates make the parameters from the
// masters. Issues the list up to the last of those tiles.
inline void update_by_trainer(const CompiledPlan& plan, const Slots& slots, Scheduler& scheduler, FirstFailure& failure,
                              const TrainerUpdate& update) {
  const Op& agreement = scheduler.issue_next();
  scheduler.finish();
  if (scheduler.run().numbers.skip) return;
  try {
    CustomUpdate(plan, slots, scheduler).run(update);
  } catch (...) {
    failure.fail(agreement);
  }
}

}  // namespace ballast
