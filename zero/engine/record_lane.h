// A program's writes and reads of records, and their copies on a drive of another rank.
#pragma once

#include <ballast/comm.h>
#include <ballast/error.h>
#include <ballast/records.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>

#include "offload/record_format.h"
#include "offload/record_store.h"
#include "zero/comm/drive_peers.h"
#include "zero/comm/on_all_ranks.h"
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
  DrivePeers* peers = nullptr;             // null: no other rank of the training uses these drives
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
  RecordMirror(MirrorFiles& files, const offload::RecordStore& own, std::span<std::byte> memory)
      : files_(files), own_(own), memory_(memory) {}
  RecordMirror(RecordMirror&&) = delete;

  ~RecordMirror() {  // waits for writes that use the memory
    offload::InFlight under_way;
    for (const offload::Completion& write : written_)
      under_way.add(write);
  }

  // Sends a sealed record of the own next generation, and starts to write the one that arrives.
  void add(std::size_t record, std::span<std::byte> bytes) {
    exchange(record, bytes, files_.generation + 1);
    ++added_;
  }

  // Commits what is kept, under the name that the own records get: all records that were added since the last commit, or, if none
  // was, all that the own drive has now.
  void commit(const CommittedState& own_state) {
    if (added_ == 0) copy_all(files_.generation + 1);
    const std::string note = note_of_mirrored(own_state.note);
    finish_writes();
    files_.store.commit(own_state.step, std::as_bytes(std::span(note)), label_of(own_state.round));
    ++files_.generation;
    added_ = 0;
  }

  void abandon() {
    files_.store.abandon();
    added_ = 0;
  }

  // Call it first, on all ranks of the group together. Copies the whole of the own commit `point` where a mirror in the group
  // lacks it; without one, the run has not begun. The next commit is counted from `next`.
  void catch_up(const std::optional<offload::CommitPoint>& point, offload::CommitPoint next) {
    const bool is_here = !point || files_.store.go_to(*point);
    const std::vector<std::string> states =
        texts_of_all(*files_.group, fmt::format("{:d} {}", is_here, own_.generation()));
    files_.generation = std::stoull(states[files_.mirrored].substr(2));
    if (std::ranges::any_of(states, [](const std::string& state) { return state.front() == '0'; })) {
      const std::string note = note_of_mirrored(own_.note());
      copy_all(files_.generation);
      finish_writes();
      files_.store.count_from({point->incarnation, point->number - 1});
      files_.store.commit(own_.step(), std::as_bytes(std::span(note)), own_.label());
    }
    files_.store.count_from(next);
  }

  SentBytes sent() const { return files_.group->sent(); }  // any thread may call

 private:
  static View as_view(std::span<std::byte> bytes) { return {bytes.data(), bytes.size(), DType::u8}; }

  std::span<std::byte> buffer(std::size_t number) const {
    const std::size_t bytes = files_.store.record_bytes();
    return memory_.subspan(number % records_in_memory * bytes, bytes);
  }

  // One after the other sends. In a group of three, a rank also receives the record that it does not keep, into the buffer that it
  // fills later.
  void exchange(std::size_t record, std::span<std::byte> bytes, std::uint64_t generation) {
    Communicator& group = *files_.group;
    const std::size_t number = next_++ % records_in_memory;
    written_[number].wait();
    const std::span<std::byte> arrived = buffer(number);
    for (std::size_t rank = 0; rank < group.size(); ++rank) {
      const bool is_other = rank != group.rank() && rank != files_.mirrored;
      if (is_other) written_[(number + 1) % records_in_memory].wait();
      const std::span<std::byte> elsewhere = is_other ? buffer(number + 1) : arrived;
      group.broadcast(as_view(rank == group.rank() ? bytes.first(arrived.size()) : elsewhere), rank);
    }
    const offload::RecordShape& shape = files_.store.shape();
    const offload::RecordName name{record, generation};
    const offload::HeadCheck head = offload::check_head(shape, name, arrived.first(offload::block_bytes));
    const std::string problem =
        head.problem.empty() ? offload::check_record(shape, name, head.seals, arrived) : head.problem;
    require(problem.empty(), Code::bad_record, [&] {
      return Problem{.what = fmt::format("cannot mirror a record: {}", problem),
                     .where = fmt::format("tile {} of rank {}, as it arrived", record, shape.rank)};
    });
    written_[number] = files_.store.write(record, arrived);
  }

  // The buffer that receives next but one holds the own record.
  void copy_all(std::uint64_t generation) {
    offload::RecordStore& store = files_.store;
    store.abandon();
    const HostPages memory = map_host_pages(own_.record_bytes(), "a record that is mirrored");
    const std::span<std::byte> bytes{memory.get(), own_.record_bytes()};
    for (std::size_t record = 0; record < store.shape().tiles; ++record) {
      own_.read(record, bytes).check();
      exchange(record, bytes, generation);
    }
  }

  std::string note_of_mirrored(std::span<const std::byte> own) const {
    const std::string mine(reinterpret_cast<const char*>(own.data()), own.size());
    return texts_of_all(*files_.group, mine)[files_.mirrored];
  }

  void finish_writes() const {
    for (const offload::Completion& write : written_)
      write.wait();
  }

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

  offload::PendingRead read(const Op& op) const {
    begin_record(op);
    const std::size_t record = plan_.record_of(op.unit, op.tile);
    const std::span<std::byte> memory = slots_.bytes(op.to);
    const offload::RecordStore& store = store_of(op.unit, op.tile);
    return op.kind == OpKind::read_first ? store.read_first(record, memory) : store.read(record, memory);
  }

  // The record is sent while its own write is under way.
  offload::Completion write(const Op& op) const {
    begin_record(op);
    offload::Completion written = write(op.unit, op.tile, slots_.bytes(op.from));
    if (mirror_ != nullptr) mirror_->add(plan_.record_of(op.unit, op.tile), slots_.bytes(op.from));
    return written;
  }

  void commit(const CommittedState& state) const {
    if (mirror_ != nullptr) mirror_->commit(state);
    stores_.trained->commit(state.step, state.note, label_of(state.round));
  }

  void abandon() const {
    if (mirror_ != nullptr) mirror_->abandon();
    if (stores_.trained != nullptr) stores_.trained->abandon();
  }

  void leave_turns() const {  // when an operation has failed: other ranks would wait for this one
    if (stores_.peers != nullptr) stores_.peers->leave();
  }

  void finish() const {  // see RecordStore
    for (offload::RecordStore* store : {stores_.trained, stores_.frozen}) {
      if (store != nullptr) store->finish();
    }
  }

  std::uint64_t step() const { return stores_.trained != nullptr ? stores_.trained->step() : 0; }

  std::span<const std::byte> note() const {  // the note of the last commit
    return stores_.trained != nullptr ? stores_.trained->note() : std::span<const std::byte>();
  }

  JointRound round() const {  // likewise
    return stores_.trained != nullptr ? round_of(stores_.trained->label()) : JointRound{};
  }

  bool keeps_run() const { return stores_.trained != nullptr && stores_.trained->shape().run_id != 0; }

  // The tile's block in the memory of its record.
  std::span<std::byte> block(std::size_t unit, std::size_t tile, std::span<std::byte> record) const {
    return store_of(unit, tile).payload(record);
  }

  // The record of a trained tile, between steps.
  offload::OpenRecord newest(std::size_t unit, std::size_t tile) const {
    const offload::ChunkPlace place = stores_.trained->place_of(plan_.record_of(unit, tile));
    return {stores_.trained->file_of(place), place, plan_.layout().units[unit].tile_elements};
  }

  offload::PendingRead read(std::size_t unit, std::size_t tile, std::span<std::byte> record) const {
    return store_of(unit, tile).read(plan_.record_of(unit, tile), record);
  }

  offload::Completion write(std::size_t unit, std::size_t tile, std::span<std::byte> record) const {
    return store_of(unit, tile).write(plan_.record_of(unit, tile), record);
  }

 private:
  void begin_record(const Op& op) const {
    if (stores_.peers != nullptr) stores_.peers->begin_record(op.lane == Lane::fetch ? 1 : 0);
  }

  offload::RecordStore& store_of(std::size_t unit, std::size_t tile) const {
    return *(plan_.layout().units[unit].is_frozen(tile) ? stores_.frozen : stores_.trained);
  }

  const CompiledPlan& plan_;
  const Slots& slots_;
  RecordStores stores_;
  RecordMirror* mirror_;
};

}  // namespace ballast
