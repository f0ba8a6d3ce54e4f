// A program's writes and reads of records, and their copies on a drive of another rank.
#pragma once

#include <ballast/comm.h>
#include <ballast/records.h>

#include <array>
#include <memory>
#include <optional>
#include <string>

#include "offload/record_format.h"
#include "offload/record_store.h"
#include "zero/engine/slots.h"
#include "zero/plan/compile.h"

namespace ballast {

// A round of joint runs, as their commits hold it.
inline offload::CommitLabel label_of(const JointRound& round) { return {round.start, round.number, round.members}; }

inline JointRound round_of(const offload::CommitLabel& label) {
  return {.start = label[0], .number = label[1], .members = label[2]};
}

// The state that records hold at a commit.
struct CommittedState {
  std::uint64_t step = 0;
  std::span<const std::byte> note{};  // the trainer's
  JointRound round{};
};

// The stores of a rank's tiles; null where the program has no such tile on a drive.
struct RecordStores {
  offload::RecordStore* trained = nullptr;
  offload::RecordStore* frozen = nullptr;  // scratch, which is never committed: no step writes to it
};

// What a rank keeps of another one, and with whom it exchanges it.
struct MirrorFiles {
  std::unique_ptr<Communicator> group{};  // the ranks that mirror each other; of the mirror alone
  std::size_t mirrored = 0;               // the place in the group of the rank whose records are kept here
  offload::RecordStore store;             // that rank's records
  std::uint64_t generation = 0;           // the last committed one of that rank's own records
};

// Writes the records of a rank on a drive of another rank too, while they are in memory. At any moment one of two copies of a
// rank's records may be lost: the other one has a commit in common with all other ranks.
//
// Order: a rank commits a step here after all its records of the step have arrived, and before it commits its own. No rank writes
// the records of the next step before all have done both (the step's agreement comes after the last step's commit), so all records
// of a rank and all of its mirror hold a common commit, whichever of them is lost.
//
// Threads: as RecordStore; and all ranks of the group write the same records in the same order. `add` and `commit` wait for the
// other ranks.
class RecordMirror {
 public:
  static constexpr std::size_t records_in_memory = 2;

  // `memory`: that of records_in_memory records. All of it outlives this.
  RecordMirror(MirrorFiles& files, const offload::RecordStore& own, std::span<std::byte> memory);
  RecordMirror(RecordMirror&&) = delete;
  ~RecordMirror();  // waits for writes that use the memory

  // Sends a sealed record of the own next generation, and starts to write the one that arrives.
  void add(std::size_t record, std::span<std::byte> bytes);

  // Commits what is kept, under the name that the own records get: all records that were added since the last commit, or, if none
  // was, all that the own drive has now.
  void commit(const CommittedState& own_state);
  void abandon();

  // Call it first, on all ranks of the group together. Copies the whole of the own commit `point` where a mirror in the group
  // lacks it; without one, the run has not begun. The next commit is counted from `next`.
  void catch_up(const std::optional<offload::CommitPoint>& point, offload::CommitPoint next);

  SentBytes sent() const { return files_.group->sent(); }  // any thread may call

 private:
  std::span<std::byte> buffer(std::size_t number) const;
  void exchange(std::size_t record, std::span<std::byte> bytes, std::uint64_t generation);
  void copy_all(std::uint64_t generation);
  std::string note_of_mirrored(std::span<const std::byte> own) const;
  void finish_writes() const;

  MirrorFiles& files_;
  const offload::RecordStore& own_;
  std::span<std::byte> memory_;
  std::array<offload::Completion, records_in_memory> written_{};
  std::size_t next_ = 0;   // buffer
  std::size_t added_ = 0;  // records, since the last commit
};

// The operations of a program that move records. Used by the two lanes of the drives. A record is checked by the thread
// that uses it, while it is in that thread's caches.
class RecordLane {
 public:
  // `mirror`: that of the records on another rank's drive; null: there is none.
  RecordLane(const CompiledPlan& plan, const Slots& slots, const RecordStores& stores, RecordMirror* mirror)
      : plan_(plan), slots_(slots), stores_(stores), mirror_(mirror) {}

  offload::PendingRead read(const Op& op) const;
  offload::Completion write(const Op& op) const;
  void commit(const CommittedState& state) const;
  void abandon() const;
  void finish() const;  // see RecordStore
  std::uint64_t step() const { return stores_.trained != nullptr ? stores_.trained->step() : 0; }
  std::span<const std::byte> note() const;  // the note of the last commit
  JointRound round() const;                 // likewise
  bool keeps_run() const { return stores_.trained != nullptr && stores_.trained->shape().run_id != 0; }

  // The tile's block in the memory of its record.
  std::span<std::byte> block(std::size_t unit, std::size_t tile, std::span<std::byte> record) const {
    return store_of(unit, tile).payload(record);
  }
  offload::PendingRead read(std::size_t unit, std::size_t tile, std::span<std::byte> record) const;
  offload::Completion write(std::size_t unit, std::size_t tile, std::span<std::byte> record) const;

 private:
  offload::RecordStore& store_of(std::size_t unit, std::size_t tile) const {
    return *(plan_.layout().units[unit].is_frozen(tile) ? stores_.frozen : stores_.trained);
  }

  const CompiledPlan& plan_;
  const Slots& slots_;
  RecordStores stores_;
  RecordMirror* mirror_;
};

}  // namespace ballast
