// Rewrites the records of a run for a training with other ranks, another stage, format or tiles, one record at a time.
#pragma once

#include <ballast/comm.h>

#include <map>
#include <set>

#include "kernels/runtime/host_pages.h"
#include "zero/plan/description.h"
#include "zero/runs/inventory.h"
#include "zero/runs/own_run.h"

namespace ballast {

// The records of a whole run at its commit, as this rank sees them. They are read, and never changed.
class EarlierRecords {
 public:
  // `shape`: with the id of the run. All of it outlives this.
  EarlierRecords(const OwnRun& own, const WholeRun& run, const offload::RecordShape& shape)
      : own_(own), run_(run), shape_(shape) {}

  // Whether a copy, which this rank sees, has the heads of all records; are_intact() reads all of their bytes, too.
  bool are_there(const WholeRun::Copy& copy) { return opened(copy) != nullptr; }
  bool are_intact(const WholeRun::Copy& copy);
  std::span<const std::byte> note_of(const WholeRun::Copy& copy) { return store_of(copy).note(); }
  // A record's payload, until the next call.
  std::span<std::byte> read(const WholeRun::Copy& copy, std::size_t record);

 private:
  using Name = std::pair<std::size_t, bool>;  // rank, and whether it is its mirror
  static Name name_of(const WholeRun::Copy& copy) { return {copy.rank, copy.is_mirror}; }

  offload::RecordStore* opened(const WholeRun::Copy& copy);
  offload::RecordStore& store_of(const WholeRun::Copy& copy);

  const OwnRun& own_;
  const WholeRun& run_;
  offload::RecordShape shape_;
  std::map<Name, std::optional<offload::RecordStore>> stores_{};  // none: records are damaged
  HostPages memory_{};
  std::pair<Name, std::size_t> in_memory_{{SIZE_MAX, false}, 0};  // and the record
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
