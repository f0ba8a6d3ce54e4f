// Updates that the trainer makes itself, between a step's decision and what follows from it.
#include "zero/engine/engine.h"

namespace ballast {

// All masters are there at once, in fp32, when the norm is known.
void Engine::require_tiles_in_memory() const {
  bool in_fp32 = true;
  for (std::size_t unit = 0; unit < parts_.plan.model().units.size(); ++unit) {
    in_fp32 = in_fp32 && parts_.plan.blocks().state(unit).format() == kernels::StateFormat::fp32;
  }
  require(!corruption_check_, Code::unsupported, [] {
    return Problem{.what = "updates that the trainer makes itself were to be verified",
                   .needed = "a rule of the library"};
  });
  require(in_fp32 && parts_.plan.tiles_on_drive() == 0 && !updates_in_backward_, Code::unsupported, [] {
    return Problem{.what = "updates that the trainer makes itself were asked for of masters that it cannot be given",
                   .needed = "state in memory, of format fp32, and updates after the backward pass"};
  });
}

// Where the list that is followed updates tiles. Of gradients on the device whose update is made on the host it makes a copy
// first: the trainer gets the original.
std::vector<SummedTile> Engine::summed_tiles() const {
  std::vector<SummedTile> tiles;
  const Op* copy = nullptr;
  for (std::size_t i = next_; i < list().size(); ++i) {
    const Op& op = list()[i];
    if (op.kind == OpKind::download) copy = &op;
    if (op.kind != OpKind::update) continue;
    const Piece& gradients = copy != nullptr && copy->to == op.from ? copy->from : op.from;
    const UnitLayout& layout = parts_.plan.layout().units[op.unit];
    const auto [first, count] = layout.tiles[op.tile];
    std::byte* const master = parts_.plan.blocks().state(op.unit).tile(slots_.data(op.state)).master;
    tiles.push_back({.unit = op.unit,
                     .range = {layout.trained.of_rank(input_.rank_in_shard_group).first + first, count},
                     .gradients = slots_.view(gradients, DType::fp32),
                     .masters = {master != nullptr ? master : slots_.data(op.to), count, DType::fp32},
                     .gradients_on_gpu = slots_.on_gpu(gradients),
                     .masters_on_gpu = slots_.on_gpu(master != nullptr ? op.state : op.to)});
  }
  return tiles;
}

// Once the step is decided; then the list's updates make parameters of the masters.
void Engine::let_trainer_update() {
  Round& round = now();
  const Op& agreement = list()[next_];
  issue(agreement, round.ops[next_++], round);
  finish();
  const TrainerUpdate update = std::exchange(options_.update, {});
  if (round.numbers.skip) return;
  try {
    update(summed_tiles(), round.numbers.gradient_factor);
  } catch (...) {
    fail_op(agreement);
  }
}

}  // namespace ballast
