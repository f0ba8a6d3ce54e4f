// Rewrites the records of a run for a training with other ranks, another stage, format or tiles, one record at a time.
#pragma once

#include <ballast/comm.h>

#include <map>
#include <set>

#include "kernels/runtime/host_pages.h"
#include "zero/own_run.h"
#include "zero/plan/recorded_state.h"
#include "zero/run_inventory.h"

namespace ballast {

// The records of a whole run at its commit, as this rank sees them. They are read, and never changed.
class EarlierRecords {
 public:
  // `shape`: with the id of the run. All of it outlives this.
  EarlierRecords(const OwnRun& own, const WholeRun& run, const offload::RecordShape& shape)
      : own_(own), run_(run), shape_(shape) {}

  // Whether the rank has all of its records, which this one sees.
  bool has_records_of(std::size_t rank) { return opened(rank) != nullptr; }
  std::span<const std::byte> note_of(std::size_t rank) { return store_of(rank).user(); }
  // A record's payload, until the next call.
  std::span<std::byte> read(std::size_t rank, std::size_t record);

 private:
  offload::RecordStore* opened(std::size_t rank);
  offload::RecordStore& store_of(std::size_t rank);

  const OwnRun& own_;
  const WholeRun& run_;
  offload::RecordShape shape_;
  std::map<std::size_t, std::optional<offload::RecordStore>> stores_{};  // by rank; none: records are damaged
  HostPages memory_{};
  std::pair<std::size_t, std::size_t> in_memory_{SIZE_MAX, 0};  // rank and record
  std::span<std::byte> payload_{};
};

class Resharding {
 public:
  // All of it outlives this.
  Resharding(const OwnRun& own, const WholeRun& run, const RecordedState& state, EarlierRecords& records,
             Communicator& world);

  // This rank's note. All ranks call it together.
  std::vector<std::byte> note();

  // Writes all records of the next generation. All ranks call it together: those that see records read them for those that do
  // not.
  void write(offload::RecordStore& store);

 private:
  struct Move {
    RecordedState::Part from{};
    std::size_t into = 0;  // the first element of this rank's tile
  };

  std::vector<Move> moves_into(std::size_t record, std::size_t rank) const;
  bool sees(std::size_t rank, std::size_t shard) const;
  void copy(const std::vector<Move>& moves, std::pair<std::size_t, std::size_t> source, std::byte* from,
            const TileMemory& into) const;
  void receive(std::size_t record, const TileMemory& into);
  void copy_seen(const std::vector<Move>& moves, const TileMemory& into);

  const OwnRun& own_;
  const WholeRun& run_;
  const RecordedState& state_;
  EarlierRecords& records_;
  Communicator& world_;
  std::vector<std::vector<std::string>> names_;  // of this training's tensors, by unit
  std::set<std::size_t> receivers_{};            // ranks that do not see all records
  HostPages received_{};
};

}  // namespace ballast
