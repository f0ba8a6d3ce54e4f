// Finds the elements of a training in the records of a run that other ranks have left, or another stage, format or tiles.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "zero/plan/description.h"
#include "zero/runs/search.h"

namespace ballast {

// Used by one thread.
class Resharding {
 public:
  // Elements that go from a record into a tile.
  struct Move {
    RecordedState::Part from{};
    std::size_t into = 0;  // the first element of the tile
  };
  using Source = std::pair<std::size_t, std::size_t>;  // shard and record
  static Source source_of(const Move& move) { return {move.from.shard, move.from.record}; }

  // All of it outlives this.
  Resharding(const OwnRun& own, const WholeRun& run, const RecordedState& state, EarlierRecords& records)
      : own_(own), run_(run), state_(state), records_(records), names_(names_in_runs(own.plan.model())) {}

  // Returns what a rank of this job needs for a tile: a range of its shard of a unit's trained tensors.
  std::vector<Move> moves_into(std::size_t unit, const Range& range, std::size_t rank) const;

  // Whether a rank of this job has records of the shard on its own drives.
  bool sees(std::size_t rank, std::size_t shard) const { return run_.nearest(shard, rank).seen_by == rank; }

  // Copies what comes from one record, whose payload is in memory.
  void copy(const std::vector<Move>& moves, Source source, std::byte* payload, const TileMemory& into) const;

  // Reads the records that this rank sees, and copies what comes from them.
  void copy_seen(const std::vector<Move>& moves, const TileMemory& into);

 private:
  const OwnRun& own_;
  const WholeRun& run_;
  const RecordedState& state_;
  EarlierRecords& records_;
  std::vector<std::vector<std::string>> names_;  // names of this training's tensors, for each unit
};

}  // namespace ballast
