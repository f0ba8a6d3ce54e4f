#include "zero/engine/record_lane.h"

namespace ballast {

offload::PendingRead RecordLane::read(const Op& op) const {
  const std::size_t record = plan_.record_of(op.unit, op.tile);
  const std::span<std::byte> memory = slots_.bytes(op.to);
  return op.kind == OpKind::read_first ? store_.read_first(record, memory) : store_.read(record, memory);
}

offload::Completion RecordLane::write(const Op& op) const { return write(op.unit, op.tile, slots_.bytes(op.from)); }

offload::PendingRead RecordLane::read(std::size_t unit, std::size_t tile, std::span<std::byte> record) const {
  return store_.read(plan_.record_of(unit, tile), record);
}

offload::Completion RecordLane::write(std::size_t unit, std::size_t tile, std::span<std::byte> record) const {
  return store_.write(plan_.record_of(unit, tile), record);
}

}  // namespace ballast
