// Checkpoints: the records of a run with a single commit, of all that is trained, whatever its tier. Any other training of the same
// model and rule loads them, or begins a run with them.
#pragma once

#include <ballast/comm.h>
#include <ballast/local_state.h>
#include <ballast/log.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <vector>

#include "zero/plan/compile.h"

namespace ballast {

// The training that saves or loads, and where. All of it outlives a call.
struct CheckpointPlace {
  const CompiledPlan& plan;
  Communicator& world;
  std::filesystem::path directory{};
  std::size_t tile_elements = 0;  // at most so many in each record
  Log* log = nullptr;
};

// Writes a checkpoint, which replaces that of the directory once all of it is on the drive. `visit` shows the trained tiles that this
// rank keeps. All ranks call it together, and all throw what fails on one: B1009 if a run is there, or a checkpoint of another model
// or rule, B1001 if ranks with the same state do not share the directory, B2202 without space.
void save_checkpoint(const CheckpointPlace& place, std::uint64_t step, std::span<const std::byte> note,
                     const std::function<void(const TileVisitor& visitor)>& visit);

struct LoadedCheckpoint {
  std::uint64_t step = 0;
  std::vector<std::byte> note{};
};
// Changes what a rank keeps, and calls `agree` before it commits changes on drives: see Training::change_state().
using StateChange = std::function<void(const TileVisitor& visitor, const std::function<LoadedCheckpoint()>& agree)>;

// Loads the checkpoint of the directory. Returns false if there is none. All ranks call it together, and all throw what fails on one:
// B1009 if it is of another model or rule, or records are missing. Only damage (B3202) and drives that fail (B3201) while records are
// read leave state half changed.
[[nodiscard]] bool load_checkpoint(const CheckpointPlace& place, const StateChange& change);

}  // namespace ballast
