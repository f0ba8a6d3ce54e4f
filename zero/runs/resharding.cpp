#include "zero/runs/resharding.h"

#include "kernels/state_access.h"
#include "kernels/update.h"

namespace ballast {

std::vector<Resharding::Move> Resharding::moves_into(std::size_t unit, const Range& range, std::size_t rank) const {
  const UnitLayout& layout = own_.plan.layout().units[unit];
  const std::size_t shard = shard_of(own_.plan.placement(), rank);
  std::vector<Move> moves;
  for (const TensorPart& part : tensors_in(own_.plan.model().units[unit], layout, layout.trained, shard, range)) {
    for (const RecordedState::Part& from : state_.parts_of(names_[unit][part.tensor], part.range)) {
      moves.push_back({from, part.in_shard - range.first + from.range.first - part.range.first});
    }
  }
  return moves;
}

void Resharding::copy(const std::vector<Move>& moves, Source source, std::byte* payload, const TileMemory& into) const {
  const TileMemory tile = state_.tile(source.second, payload);
  for (const Move& move : moves) {
    if (source_of(move) != source) continue;
    const auto& [part, begin] = move;
    kernels::copy_state(kernels::part(tile, part.in_tile, part.range.count),
                        kernels::part(into, begin, part.range.count));
  }
}

void Resharding::copy_seen(const std::vector<Move>& moves, const TileMemory& into) {
  Source last{SIZE_MAX, 0};
  for (const Move& move : moves) {
    const Source source = source_of(move);
    if (source == last || !sees(own_.rank(), move.from.shard)) continue;
    last = source;
    copy(moves, source, records_.read(run_.nearest(source.first, own_.rank()), source.second).data(), into);
  }
}

}  // namespace ballast
