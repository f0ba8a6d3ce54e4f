// The memory of a unit's parameters while a step runs.
#pragma once

#include "zero/plan/compile_context.h"
#include "zero/plan/gathered_units.h"

namespace ballast {

class ParameterPieces {
 public:
  ParameterPieces(const CompileContext& context, const GatheredUnits& gathered)
      : context_(context), gathered_(gathered) {}

  Piece full(std::size_t unit) const;
  Piece full(std::size_t unit, const Section& section) const;
  Piece shard(std::size_t unit, const Section& section) const;       // this rank's, inside the full parameters
  Piece kept(std::size_t unit, const Section& section) const;        // what the device keeps between uses
  Piece kept_shard(std::size_t unit, const Section& section) const;  // this rank's shard in it
  Piece kept_tile(std::size_t unit, std::size_t tile) const;         // the part of it that a tile updates

 private:
  const CompileContext& context_;
  const GatheredUnits& gathered_;
};

}  // namespace ballast
