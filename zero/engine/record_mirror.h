// Writes the records of a rank on a drive of another rank too, while they are in memory. At any moment one of two copies of a rank's
// records may be lost: the other one has a commit in common with all other ranks.
#pragma once

#include <ballast/comm.h>

#include <array>
#include <memory>
#include <optional>
#include <string>

#include "offload/record_store.h"

namespace ballast {

struct CommittedState;

// What a rank keeps of another one, and with whom it exchanges it.
struct MirrorFiles {
  std::unique_ptr<Communicator> group{};  // the ranks that mirror each other; of the mirror alone
  std::size_t mirrored = 0;               // the place in the group of the rank whose records are kept here
  offload::RecordStore store;             // that rank's records
  std::uint64_t generation = 0;           // the last committed one of that rank's own records
};

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

}  // namespace ballast
