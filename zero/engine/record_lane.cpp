#include "zero/engine/record_lane.h"

#include "zero/engine/record_mirror.h"

namespace ballast {

offload::PendingRead RecordLane::read(const Op& op) const {
  const std::size_t record = plan_.record_of(op.unit, op.tile);
  const std::span<std::byte> memory = slots_.bytes(op.to);
  return op.kind == OpKind::read_first ? store_.read_first(record, memory) : store_.read(record, memory);
}

// The record is sent while its own write is under way.
offload::Completion RecordLane::write(const Op& op) const {
  offload::Completion written = write(op.unit, op.tile, slots_.bytes(op.from));
  if (mirror_ != nullptr) mirror_->add(plan_.record_of(op.unit, op.tile), slots_.bytes(op.from));
  return written;
}

void RecordLane::commit(const CommittedState& state) const {
  if (mirror_ != nullptr) mirror_->commit(state);
  store_.commit(state.step, state.note, label_of(state.round));
}

void RecordLane::abandon() const {
  if (mirror_ != nullptr) mirror_->abandon();
  store_.abandon();
}

offload::PendingRead RecordLane::read(std::size_t unit, std::size_t tile, std::span<std::byte> record) const {
  return store_.read(plan_.record_of(unit, tile), record);
}

offload::Completion RecordLane::write(std::size_t unit, std::size_t tile, std::span<std::byte> record) const {
  return store_.write(plan_.record_of(unit, tile), record);
}

}  // namespace ballast
