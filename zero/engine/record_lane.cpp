#include "zero/engine/record_lane.h"

#include "zero/engine/record_mirror.h"

namespace ballast {

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
