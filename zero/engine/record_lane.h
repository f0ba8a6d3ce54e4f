// The operations of a program that move records. Used by the two lanes of the drives. A record is checked by the thread
// that uses it, while it is in that thread's caches.
#pragma once

#include <ballast/records.h>

#include <optional>

#include "offload/record_format.h"
#include "offload/record_store.h"
#include "zero/engine/slots.h"
#include "zero/plan/compiled_plan.h"

namespace ballast {

// A round of joint runs, as their commits hold it.
inline offload::CommitLabel label_of(const JointRound& round) { return {round.start, round.number, round.members}; }

inline JointRound round_of(const offload::CommitLabel& label) {
  return {.start = label[0], .number = label[1], .members = label[2]};
}

class RecordMirror;

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
