// The operations of a program that move records. Used by the two lanes of the drives. A record is checked by the thread
// that uses it, while it is in that thread's caches.
#pragma once

#include <optional>

#include "offload/record_store.h"
#include "zero/engine/joint_round.h"
#include "zero/engine/slots.h"
#include "zero/plan/compiled_plan.h"

namespace ballast {

class RecordMirror;

// The state that records hold at a commit.
struct CommittedState {
  std::uint64_t step = 0;
  std::span<const std::byte> note{};  // the trainer's
  JointRound round{};
};

class RecordLane {
 public:
  // `mirror`: that of the records on another rank's drive; null: there is none.
  RecordLane(const CompiledPlan& plan, const Slots& slots, offload::RecordStore& store, RecordMirror* mirror)
      : plan_(plan), slots_(slots), store_(store), mirror_(mirror) {}

  offload::PendingRead read(const Op& op) const;
  offload::Completion write(const Op& op) const;
  void commit(const CommittedState& state) const;
  void abandon() const;
  void finish() const { store_.finish(); }  // see RecordStore
  std::uint64_t step() const { return store_.step(); }
  std::span<const std::byte> note() const { return store_.note(); }  // of the last commit
  JointRound round() const { return round_of(store_.label()); }      // likewise
  bool keeps_run() const { return store_.shape().run_id != 0; }

  // The tile's block in the memory of its record.
  std::span<std::byte> block(std::span<std::byte> record) const { return store_.payload(record); }
  offload::PendingRead read(std::size_t unit, std::size_t tile, std::span<std::byte> record) const;
  offload::Completion write(std::size_t unit, std::size_t tile, std::span<std::byte> record) const;

 private:
  const CompiledPlan& plan_;
  const Slots& slots_;
  offload::RecordStore& store_;
  RecordMirror* mirror_;
};

}  // namespace ballast
