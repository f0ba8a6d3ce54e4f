// Emits the operations that bring full parameters to the device: reads of records, uploads and gathers.
#pragma once

#include "zero/plan/parameter_pieces.h"
#include "zero/plan/record_stream.h"

namespace ballast {

class ParameterGathers {
 public:
  // `records` says which write a read of the same record has to wait for.
  ParameterGathers(const CompileContext& context, const RecordStream& records);

  const ParameterPieces& pieces() const { return pieces_; }

  // Gathers a unit for its use at `position`, unless it is gathered already. Returns false if the units that are used
  // between `now` and then leave no memory. This unit is one of them if only one of its two uses is exact.
  bool ensure_gathered(std::size_t unit, std::size_t now, std::size_t position);

  // Whether a unit is gathered, or can be while all others stay.
  bool has_spare_memory(std::size_t unit) const;

  // Gathers the units that are held together from `position` on, and drops others if necessary. Throws B2004 if they do
  // not fit.
  void ensure_chain_gathered(std::size_t position);

  void prefetch(std::size_t micro_step, std::size_t position);

  // Gathers what is kept of a unit's parameters beyond this rank's shard, which all ranks need each other's updates for.
  void gather_kept(std::size_t unit);
  void gather_kept_frozen(std::size_t unit);  // once: they do not change

  void drop(std::size_t unit) { gathered_.drop(unit); }  // its parameters have changed, or soon will
  void drop_all() { gathered_.clear(); }

 private:
  void gather(std::size_t unit, const Visit& visit);
  void gather_replica(std::size_t unit, const Section& section);
  void upload_shard(std::size_t unit, Phase phase);
  void upload_tile(std::size_t unit, std::size_t tile, Phase phase);
  void fetch(const TileName& name, Phase phase, const Piece& to);
  std::size_t chain_bytes(std::size_t position) const;

  const CompileContext& context_;
  const RecordStream& records_;
  GatheredUnits gathered_;
  ParameterPieces pieces_;
};

}  // namespace ballast
