// Emits the update of a unit's tiles, in whichever tier their state lies.
#pragma once

#include "zero/plan/gradient_sums.h"
#include "zero/plan/parameter_pieces.h"
#include "zero/plan/record_stream.h"

namespace ballast {

class TileUpdates {
 public:
  struct Parts {
    const ParameterPieces& parameters;
    const GradientSums& gradients;
    const RankWaits& waits;
    RecordStream& records;
  };

  TileUpdates(const CompileContext& context, const Parts& parts) : context_(context), parts_(parts) {}

  void update(std::size_t unit);

  // Leaves a unit without gradients as it is, but writes its records, because the next generation needs them too.
  void carry_over(std::size_t unit);

 private:
  void update_tile(std::size_t unit, std::size_t tile);
  void update_on_device(std::size_t unit, std::size_t tile);
  void update_on_host(std::size_t unit, std::size_t tile, const Piece& block, const BlockSizes& sizes);
  Piece gradient_of(std::size_t unit, std::size_t tile) const;
  Piece kept_apart(std::size_t unit, std::size_t tile) const;

  const CompileContext& context_;
  Parts parts_;
};

}  // namespace ballast
