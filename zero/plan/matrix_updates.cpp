#include "zero/plan/matrix_updates.h"

namespace ballast {

void MatrixUpdates::begin(std::size_t unit) {
  if (!has_matrices(unit)) return;
  const std::size_t width = byte_size(DType::bf16);
  StepRings& rings = context_.slots.rings;
  Memory& memory = begun_[unit];
  memory.directions = rings.directions.next(context_.layout(unit).trained.shard * width);
  memory.matrices = memory.directions;
  tiles_.make_directions(unit, memory.directions);
  if (context_.input.placement.shards == 1) return;
  memory.matrices = rings.matrices.next(context_.slots.matrices(unit).elements * width);
  context_.builder.add(
      {.kind = OpKind::collect, .lane = Lane::reduce, .unit = unit, .from = memory.directions, .to = memory.matrices},
      waits_.agreement());
}

void MatrixUpdates::end(std::size_t unit) {
  if (!has_matrices(unit)) return;
  const auto [directions, matrices] = begun_.extract(unit).mapped();
  const double steps = static_cast<double>(*context_.input.orthogonalization_steps);
  context_.builder.add({.kind = OpKind::orthogonalize,
                        .lane = Lane::update,
                        .unit = unit,
                        .operations = steps * context_.slots.matrices(unit).operations,
                        .to = matrices,
                        .state = context_.slots.workspace()},
                       waits_.agreement());
  if (context_.input.placement.shards > 1) {
    context_.builder.add(
        {.kind = OpKind::distribute, .lane = Lane::reduce, .unit = unit, .from = matrices, .to = directions},
        waits_.agreement());
  }
  tiles_.update_from(unit, directions);
}

}  // namespace ballast
