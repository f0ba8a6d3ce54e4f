#include "zero/engine/custom_update.h"

#include <ballast/error.h>

#include <algorithm>

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
  require(in_fp32 && parts_.plan.tiles_on_drive() == 0 && !in_backward, Code::unsupported, [] {
    return Problem{
        .what = "cannot call a custom update: its masters are not all in memory, in fp32, when the norm is known",
        .needed = "state in memory, of format fp32, and updates after the backward pass"};
  });
}

void CustomUpdate::run(const TrainerUpdate& update) const {
  const Op& agreement = parts_.scheduler.issue_next();
  parts_.scheduler.finish();
  const StepNumbers& numbers = parts_.scheduler.run().numbers;
  if (numbers.skip) return;
  try {
    update(summed_tiles(), numbers.gradient_factor);
  } catch (...) {
    parts_.failure.fail(agreement);
  }
}

// Returns the tiles that the rest of the list updates. Gradients on the device that are updated on the host are copied
// there first; the trainer gets the original.
std::vector<SummedTile> CustomUpdate::summed_tiles() const {
  std::vector<SummedTile> tiles;
  const Op* copy = nullptr;
  for (const Op& op : parts_.scheduler.rest()) {
    if (op.kind == OpKind::download) copy = &op;
    if (op.kind != OpKind::update) continue;
    tiles.push_back(summed_tile(op, copy != nullptr && copy->to == op.from ? copy->from : op.from));
  }
  return tiles;
}

SummedTile CustomUpdate::summed_tile(const Op& update, const Piece& gradients) const {
  const Slots& slots = parts_.slots;
  const UnitLayout& layout = parts_.plan.layout().units[update.unit];
  const auto [first, count] = layout.tiles[update.tile];
  std::byte* const master = parts_.plan.blocks().state(update.unit, update.tile).tile(slots.data(update.state)).master;
  return {.unit = update.unit,
          .range = {layout.trained.of_rank(parts_.plan.input().rank_in_shard_group).first + first, count},
          .gradients = slots.view(gradients, parts_.plan.input().dtype_of_sums(update.unit)),
          .masters = {master != nullptr ? master : slots.data(update.to), count, DType::fp32},
          .gradients_on_gpu = slots.on_gpu(gradients),
          .masters_on_gpu = slots.on_gpu(master != nullptr ? update.state : update.to)};
}

}  // namespace ballast
