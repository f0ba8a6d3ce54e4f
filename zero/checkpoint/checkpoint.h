// Checkpoints: all that a training keeps, whatever its tier, as ballast.save() of Python writes it. Any other training of the same model
// and rule loads them, in C++ and in Python.
#pragma once

#include <ballast/comm.h>
#include <ballast/local_state.h>
#include <ballast/log.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "zero/checkpoint/files.h"
#include "zero/plan/compile.h"

namespace ballast {

// The folders of the checkpoints that a training has saved, loaded or replaced, by directory.
using KnownCheckpoints = std::map<std::filesystem::path, std::set<std::string>>;

// The training that saves or loads, and where. All of it outlives a call.
struct CheckpointPlace {
  const CompiledPlan& plan;
  Communicator& world;
  KnownCheckpoints& known;
  std::filesystem::path directory{};
  Log* log = nullptr;
};

// The tensors of a training under these names, by unit, and their optimizer. Throws B1001 if two would have the same name.
SavedCheckpoint saved_of(const CompiledPlan& plan, const std::vector<std::vector<std::string>>& names,
                         std::uint64_t step);

// Writes a checkpoint, which replaces that of the directory once all of it is on the drive. `tiles` are those that this rank keeps, and
// `visit` shows them with their memory, but for records of a run that the file system has cloned. All ranks call it together, and all
// throw what fails on one:
// - B1001: the directory has a checkpoint of another model, or not all ranks see it.
// - B2202: the drive has too little space.
// - B2204: another job saves there, or has saved since this training saved or loaded there.
void save_checkpoint(const CheckpointPlace& place, std::uint64_t step, std::span<const std::byte> note,
                     const std::vector<LocalTile>& tiles,
                     const std::function<void(const TileVisitor& visitor, const TileFilter& which)>& visit);

struct LoadedCheckpoint {
  std::uint64_t step = 0;
  std::vector<std::byte> note{};
};
// Changes what a rank keeps, and calls `agree` before it commits changes on drives: see TrainingState::change().
using StateChange = std::function<void(const TileVisitor& visitor, const std::function<LoadedCheckpoint()>& agree)>;

// Loads the checkpoint of the directory. Returns false if there is none. All ranks call it together, and all throw what fails on one:
// B1009 if it is of another model or rule, B3202 if its files are missing or damaged. Only damage and drives that fail (B3201) while
// chunks are read leave state half changed.
[[nodiscard]] bool load_checkpoint(const CheckpointPlace& place, const std::vector<LocalTile>& tiles,
                                   const StateChange& change);

}  // namespace ballast
