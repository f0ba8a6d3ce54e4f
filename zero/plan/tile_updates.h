// Emits the update of a unit's tiles, in whichever tier their state lies.
#pragma once

#include <map>

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

  // The same in two parts, for a rule of whole matrices. `directions`: of the unit's tiles, on the device. Units are updated in
  // the order in which their directions are made.
  void make_directions(std::size_t unit, const Piece& directions);
  void update_from(std::size_t unit, const Piece& directions);

  // Leaves a unit without gradients as it is, but writes its records, because the next generation needs them too.
  void carry_over(std::size_t unit);

 private:
  // What a tile keeps on the host.
  struct Block {
    Piece memory{};
    BlockSizes sizes{};

    Piece state() const { return memory.part(sizes.parameter, sizes.state); }
  };
  // What a tile is updated from, and the buffers that bring it to the host.
  struct Source {
    Piece values{};
    Tier tier = Tier::device;
    Ring& on_its_way;
  };

  void update_tile(const TileName& name, const Block& block, const Source& from);
  void update_on_host(const TileName& name, const Block& block, const Source& from);
  void make_direction(const TileName& name, const Block& block, const Piece& direction);
  Block block_in_memory(const TileName& name) const;  // none on the device
  Block block_of_record(std::size_t unit, const Piece& record) const;
  bool is_on_drive(const TileName& name) const;
  Source gradient_of(const TileName& name) const;
  Piece direction_of(const TileName& name, const Piece& directions) const;
  Piece on_host(const TileName& name, const Source& source) const;
  Piece kept_apart(const TileName& name) const;
  void move(OpKind kind, Lane lane, const TileName& name, const Piece& from, const Piece& to) const;

  const CompileContext& context_;
  Parts parts_;
  std::map<TileName, Block> held_;  // blocks of records between the two parts of an update
};

}  // namespace ballast
