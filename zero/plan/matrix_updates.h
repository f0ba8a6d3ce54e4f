// Emits the update of a unit by a rule of whole matrices: directions of its tiles, which go to the ranks that orthogonalize them,
// and come back to move the parameters. With one rank nothing moves.
#pragma once

#include "zero/plan/tile_updates.h"

namespace ballast {

class MatrixUpdates {
 public:
  MatrixUpdates(const CompileContext& context, const RankWaits& waits, TileUpdates& tiles)
      : context_(context), waits_(waits), tiles_(tiles) {}

  // Updates end in the order in which they begin. Between the two of one unit, another one may begin, if the slots have memory
  // for both: the directions of that are collected while the products of the first are computed.
  void begin(std::size_t unit);
  void end(std::size_t unit);

 private:
  // The memory of an update that has begun.
  struct Memory {
    Piece directions{};
    Piece matrices{};
  };

  bool has_matrices(std::size_t unit) const { return context_.layout(unit).trained.shard > 0; }

  const CompileContext& context_;
  const RankWaits& waits_;
  TileUpdates& tiles_;
  std::map<std::size_t, Memory> begun_;  // by unit
};

}  // namespace ballast
