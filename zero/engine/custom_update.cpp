#include "zero/engine/custom_update.h"

#include <ballast/error.h>

#include <set>
#include <utility>

namespace ballast {

void CustomUpdate::require_possible() const {
  bool in_fp32 = true;
  for (std::size_t unit = 0; unit < parts_.plan.model().units.size(); ++unit) {
    in_fp32 = in_fp32 && parts_.plan.blocks().state(unit, 0).format() == StateFormat::fp32;
  }
  require(!parts_.is_checked, Code::unsupported, [] {
    return Problem{.what = "cannot verify updates: the trainer makes them itself", .needed = "a rule of the library"};
  });
  const bool in_backward = parts_.plan.input().schedule.update_in_backward;
  require(in_fp32 && !in_backward, Code::unsupported, [] {
    return Problem{.what = "cannot call a custom update: its masters are not in fp32 when the norm is known",
                   .needed = "state of format fp32, and updates after the backward pass"};
  });
}

void CustomUpdate::run(const TrainerUpdate& update) const {
  Scheduler& scheduler = parts_.scheduler;
  const Op& agreement = scheduler.issue_next();
  scheduler.finish();
  const StepNumbers& numbers = scheduler.run().numbers;
  if (numbers.skip) return;
  const auto [of_kept, of_passing] = updates();
  try {
    if (!of_kept.empty() || of_passing.empty()) {
      update({kept_tiles(of_kept), numbers.gradient_factor, of_passing.empty()});
    }
    for (const std::size_t position : of_passing) {
      while (scheduler.position() < position)
        scheduler.issue_next();
      scheduler.wait_for_inputs_of_next();
      const SummedTile tile = summed_tile(op(position), op(position).from);
      update({{&tile, 1}, numbers.gradient_factor, position == of_passing.back()});
    }
  } catch (...) {
    parts_.failure.fail(agreement);
  }
}

// A tile passes through memory if it is written to a drive, or if its parameter, which is the master, is a copy that was
// downloaded.
CustomUpdate::Updates CustomUpdate::updates() const {
  const std::vector<Op>& list = parts_.scheduler.list();
  std::set<std::pair<std::size_t, std::size_t>> on_drive;
  for (const Op& op : list) {
    if (op.kind == OpKind::write) on_drive.insert({op.unit, op.tile});
  }
  Updates updates;
  Piece downloaded;
  for (std::size_t position = parts_.scheduler.position(); position < list.size(); ++position) {
    const Op& op = list[position];
    if (op.kind == OpKind::download) downloaded = op.to;
    if (op.kind != OpKind::update) continue;
    const bool passes = on_drive.contains({op.unit, op.tile}) || (downloaded.exists() && downloaded == op.to);
    (passes ? updates.of_passing : updates.of_kept).push_back(position);
  }
  return updates;
}

// Gradients on the device that are updated on the host are copied there first; the trainer gets the original.
std::vector<SummedTile> CustomUpdate::kept_tiles(std::span<const std::size_t> updates) const {
  std::vector<SummedTile> tiles;
  std::size_t position = parts_.scheduler.position();
  for (const std::size_t update : updates) {
    const Op* copy = nullptr;
    for (; position < update; ++position) {
      if (op(position).kind == OpKind::download) copy = &op(position);
    }
    tiles.push_back(
        summed_tile(op(update), copy != nullptr && copy->to == op(update).from ? copy->from : op(update).from));
  }
  return tiles;
}

std::vector<TilePart> CustomUpdate::parts_of(std::size_t number, const Range& in_shard) const {
  const Unit& unit = parts_.plan.model().units[number];
  const UnitLayout& layout = parts_.plan.layout().units[number];
  std::vector<TilePart> parts;
  for (const TensorPart& part :
       tensors_in(unit, layout, layout.trained, parts_.plan.input().rank_in_shard_group, in_shard)) {
    parts.push_back({part.tensor, unit.tensors[part.tensor].group, part.range, part.in_shard - in_shard.first});
  }
  return parts;
}

SummedTile CustomUpdate::summed_tile(const Op& update, const Piece& gradients) const {
  const Slots& slots = parts_.slots;
  const UnitLayout& layout = parts_.plan.layout().units[update.unit];
  const auto [first, count] = layout.tiles[update.tile];
  const TileMemory state = parts_.plan.blocks().state(update.unit, update.tile).tile(slots.data(update.state));
  const bool is_master = state.parameter_dtype == DType::fp32;  // the parameter
  return {.unit = update.unit,
          .range = {layout.trained.of_rank(parts_.plan.input().rank_in_shard_group).first + first, count},
          .parts = parts_of(update.unit, layout.tiles[update.tile]),
          .gradients = slots.view(gradients, parts_.plan.input().dtype_of_sums(update.unit)),
          .masters = {is_master ? slots.data(update.to) : state.master, count, DType::fp32},
          .own = state.own,
          .gradients_on_gpu = slots.on_gpu(gradients),
          .masters_on_gpu = slots.on_gpu(is_master ? update.to : update.state)};
}

}  // namespace ballast
