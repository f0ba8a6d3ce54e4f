#include "zero/plan/parameter_pieces.h"

namespace ballast {

Piece ParameterPieces::full(std::size_t unit) const {
  const std::size_t bytes = context_.slots.full_bytes(unit);
  if (!context_.slots.is_gathered_per_use(unit)) return {context_.slots.of(unit).parameters, 0, bytes};
  return {context_.slots.gathered_slot(), gathered_.find(unit)->begin, bytes};
}

Piece ParameterPieces::full(std::size_t unit, const Section& section) const {
  const std::size_t width = context_.width(unit);
  return full(unit).part(section.first * width, section.count() * width);
}

Piece ParameterPieces::shard(std::size_t unit, const Section& section) const {
  const std::size_t width = context_.width(unit);
  const Range shard = section.of_rank(context_.input.rank_in_shard_group);
  return full(unit).part(shard.first * width, shard.count * width);
}

Piece ParameterPieces::kept(std::size_t unit, const Section& section) const {
  if (!context_.slots.is_gathered_per_use(unit)) return shard(unit, section);
  const CompileInput& in = context_.input;
  const std::size_t width = context_.width(unit);
  const std::size_t before = section.first == 0 ? 0 : in.kept(context_.layout(unit).trained).shard;
  return {context_.slots.of(unit).parameters, before * width, in.kept(section).shard * width};
}

Piece ParameterPieces::kept_shard(std::size_t unit, const Section& section) const {
  const CompileInput& in = context_.input;
  const std::size_t width = context_.width(unit);
  const std::size_t before = section.of_rank(in.rank_in_shard_group).first - in.kept_range(section).first;
  return kept(unit, section).part(before * width, section.shard * width);
}

Piece ParameterPieces::kept_tile(std::size_t unit, std::size_t tile) const {
  const std::size_t width = context_.width(unit);
  const auto [first, count] = context_.layout(unit).tiles[tile];
  return kept_shard(unit, context_.layout(unit).trained).part(first * width, count * width);
}

}  // namespace ballast
