#include "zero/engine/record_lane.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>

#include "zero/comm/on_all_ranks.h"

namespace ballast {
namespace {

View as_view(std::span<std::byte> bytes) { return {bytes.data(), bytes.size(), DType::u8}; }

}  // namespace

RecordMirror::RecordMirror(MirrorFiles& files, const offload::RecordStore& own, std::span<std::byte> memory)
    : files_(files), own_(own), memory_(memory) {}

RecordMirror::~RecordMirror() {
  offload::InFlight under_way;
  for (const offload::Completion& write : written_)
    under_way.add(write);
}

std::span<std::byte> RecordMirror::buffer(std::size_t number) const {
  const std::size_t bytes = files_.store.record_bytes();
  return memory_.subspan(number % records_in_memory * bytes, bytes);
}

void RecordMirror::finish_writes() const {
  for (const offload::Completion& write : written_)
    write.wait();
}

void RecordMirror::add(std::size_t record, std::span<std::byte> bytes) {
  exchange(record, bytes, files_.generation + 1);
  ++added_;
}

// One after the other sends. In a group of three, a rank also receives the record that it does not keep, into the buffer that it
// fills later.
void RecordMirror::exchange(std::size_t record, std::span<std::byte> bytes, std::uint64_t generation) {
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
void RecordMirror::copy_all(std::uint64_t generation) {
  offload::RecordStore& store = files_.store;
  store.abandon();
  const HostPages memory = map_host_pages(own_.record_bytes(), "a record that is mirrored");
  const std::span<std::byte> bytes{memory.get(), own_.record_bytes()};
  for (std::size_t record = 0; record < store.shape().tiles; ++record) {
    own_.read(record, bytes).check();
    exchange(record, bytes, generation);
  }
}

std::string RecordMirror::note_of_mirrored(std::span<const std::byte> own) const {
  const std::string mine(reinterpret_cast<const char*>(own.data()), own.size());
  return texts_of_all(*files_.group, mine)[files_.mirrored];
}

void RecordMirror::commit(const CommittedState& own_state) {
  if (added_ == 0) copy_all(files_.generation + 1);
  const std::string note = note_of_mirrored(own_state.note);
  finish_writes();
  files_.store.commit(own_state.step, std::as_bytes(std::span(note)), label_of(own_state.round));
  ++files_.generation;
  added_ = 0;
}

void RecordMirror::abandon() {
  files_.store.abandon();
  added_ = 0;
}

void RecordMirror::catch_up(const std::optional<offload::CommitPoint>& point, offload::CommitPoint next) {
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

offload::PendingRead RecordLane::read(const Op& op) const {
  const std::size_t record = plan_.record_of(op.unit, op.tile);
  const std::span<std::byte> memory = slots_.bytes(op.to);
  const offload::RecordStore& store = store_of(op.unit, op.tile);
  return op.kind == OpKind::read_first ? store.read_first(record, memory) : store.read(record, memory);
}

// The record is sent while its own write is under way.
offload::Completion RecordLane::write(const Op& op) const {
  offload::Completion written = write(op.unit, op.tile, slots_.bytes(op.from));
  if (mirror_ != nullptr) mirror_->add(plan_.record_of(op.unit, op.tile), slots_.bytes(op.from));
  return written;
}

void RecordLane::commit(const CommittedState& state) const {
  if (mirror_ != nullptr) mirror_->commit(state);
  stores_.trained->commit(state.step, state.note, label_of(state.round));
}

void RecordLane::abandon() const {
  if (mirror_ != nullptr) mirror_->abandon();
  if (stores_.trained != nullptr) stores_.trained->abandon();
}

void RecordLane::finish() const {
  for (offload::RecordStore* store : {stores_.trained, stores_.frozen}) {
    if (store != nullptr) store->finish();
  }
}

std::span<const std::byte> RecordLane::note() const {
  return stores_.trained != nullptr ? stores_.trained->note() : std::span<const std::byte>();
}

JointRound RecordLane::round() const {
  return stores_.trained != nullptr ? round_of(stores_.trained->label()) : JointRound{};
}

offload::PendingRead RecordLane::read(std::size_t unit, std::size_t tile, std::span<std::byte> record) const {
  return store_of(unit, tile).read(plan_.record_of(unit, tile), record);
}

offload::Completion RecordLane::write(std::size_t unit, std::size_t tile, std::span<std::byte> record) const {
  return store_of(unit, tile).write(plan_.record_of(unit, tile), record);
}

}  // namespace ballast
