// What a rank keeps of the parameters and the optimizer state between steps, and how callers bring and look at it.
#pragma once

#include <ballast/model.h>
#include <ballast/state_format.h>
#include <ballast/view.h>

#include <cstddef>
#include <exception>
#include <functional>
#include <optional>

namespace ballast::offload {
struct OpenRecord;
}

namespace ballast {

// Writes a range of a tensor's initial parameters, in its unit's format. Called for this rank's shard only, except where
// parameters are kept full.
using ParameterSource = std::function<void(std::size_t unit, std::size_t tensor, Range range, const View& to)>;

// Parameter, master and moments of one tile of this rank's shard, or of a stretch of it if it is large, in host memory.
// Frozen parameters are not cut into tiles: they come in stretches, with the parameter alone.
struct LocalTile {
  std::size_t unit = 0;
  Range range{};  // a range of the unit's elements
  TileMemory memory{};
  bool frozen = false;
  const offload::OpenRecord* record =
      nullptr;  // of a run, with all of a checkpoint's parts of the tile; filters see it alone
};
using TileVisitor = std::function<void(const LocalTile& tile)>;
using TileFilter = std::function<bool(const LocalTile& tile)>;  // sees tiles without their memory

// A part of one tensor in one tile of this rank.
struct StatePart {
  std::size_t unit = 0;
  std::size_t tensor = 0;
  std::size_t first = 0;  // element of the tensor
  bool frozen = false;    // the parameter alone
  TileMemory memory{};
};

// A part of a tensor as a checkpoint holds it: its parameter, then its state, laid out as in a tile's block.
struct ChunkKind {
  DType parameter = DType::fp32;
  std::optional<StateFormat> format{};  // none: the parameter alone
  bool momentum = false;
  bool variance = false;
  std::size_t own_values = 0;  // values of the trainer's own; in records alone

  std::size_t bytes(std::size_t elements) const;
  TileMemory tile(std::byte* chunk, std::size_t elements) const;
};

ChunkKind kind_of(const TileMemory& tile, bool frozen);

// Decides on all ranks together whether each has memory for a move. Called on each rank, with the error where memory is
// lacking, else with null. Throws on all ranks if it is lacking on any.
using AgreeOnMemory = std::function<void(const std::exception_ptr& failure)>;

// Fits a single rank.
inline void throw_own(const std::exception_ptr& failure) {
  if (failure) std::rethrow_exception(failure);
}

}  // namespace ballast
