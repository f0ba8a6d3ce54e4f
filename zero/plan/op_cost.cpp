#include "zero/plan/op_cost.h"

#include "zero/plan/collective_cost.h"

namespace ballast {
namespace {

// Encoding reads and writes once, and decoding does. The memory of a gather has the codes of all ranks.
std::size_t bytes_of_coding(const Op& op) {
  if (!op.codes.exist()) return 0;
  const std::size_t written = op.codes.memory.bytes - (op.kind == OpKind::gather ? op.codes.received : 0);
  return op.from.bytes + written + op.codes.received + op.to.bytes;
}

// Matrices are spread over the ranks, so a rank keeps about its share of what it has.
std::size_t bytes_exchanged(std::size_t of_shard, std::size_t shards) {
  return static_cast<std::size_t>(part_of_others(shards) * static_cast<double>(of_shard));
}

}  // namespace

std::size_t bytes_moved(const Op& op, const Placement& placement) {
  switch (op.kind) {
    case OpKind::clear:
    case OpKind::read:
    case OpKind::read_first: return op.to.bytes;
    case OpKind::gather: return op.codes.exist() ? op.codes.received : op.to.bytes - op.from.bytes;
    case OpKind::reduce: {
      if (op.codes.exist()) return op.codes.received;
      const bool shards = op.ranks == Ranks::shard_group;
      const double part = part_of_others(shards ? placement.ranks_per_group() : placement.groups());
      const bool gathers = !shards && placement.parameter_replicas == 1;  // the sum, for all replicas
      const std::size_t bytes = op.from.bytes + (gathers ? op.to.bytes : 0);
      return static_cast<std::size_t>(part * static_cast<double>(bytes));
    }
    case OpKind::upload:
    case OpKind::download:
    case OpKind::norm:
    case OpKind::write: return op.from.bytes;
    case OpKind::keep: return 2 * op.from.bytes;
    case OpKind::accumulate: return op.from.bytes + 2 * op.to.bytes;
    case OpKind::update: return op.from.bytes + 2 * op.to.bytes + 2 * op.state.bytes;
    case OpKind::momentum: return op.from.bytes + op.to.bytes + 2 * op.state.bytes;
    case OpKind::collect: return bytes_exchanged(op.from.bytes, placement.shards);
    case OpKind::distribute: return bytes_exchanged(op.to.bytes, placement.shards);
    case OpKind::orthogonalize: return op.to.bytes;
    case OpKind::use:
    case OpKind::agree:
    case OpKind::commit:
    case OpKind::meet: return 0;
  }
  return 0;
}

double seconds_of(const Op& op, const SimulationInput& input) {
  const Machine& machine = input.machine;
  const auto bytes = static_cast<double>(bytes_moved(op, input.placement));
  const auto coding = static_cast<double>(bytes_of_coding(op));
  const auto memory = [&](const Piece& piece) {
    return input.program.slots[piece.slot].tier == Tier::device ? machine.device_memory : machine.host_memory;
  };
  switch (op.kind) {
    case OpKind::read:
    case OpKind::read_first: return bytes / machine.read;
    case OpKind::write: return bytes / machine.write;
    case OpKind::upload: return bytes / machine.upload;
    case OpKind::download: return bytes / machine.download;
    case OpKind::gather:
    case OpKind::reduce:
    case OpKind::collect:
    case OpKind::distribute:
      return machine.collective_latency + seconds_on_links(op, input.placement, machine).sum() +
             coding / machine.device_memory;
    case OpKind::orthogonalize: return machine.products > 0 ? op.operations / machine.products : 0;
    case OpKind::clear: return bytes / memory(op.to);
    case OpKind::momentum:
    case OpKind::norm:
    case OpKind::keep:
    case OpKind::accumulate:
    case OpKind::update: return bytes / memory(op.from);
    case OpKind::agree:
    case OpKind::meet: return 2 * machine.collective_latency;
    case OpKind::commit: return machine.commit_latency;
    case OpKind::use: {
      const UnitWork& work = input.work[op.unit];
      return op.phase == Phase::forward ? work.forward_seconds : work.backward_seconds;
    }
  }
  return 0;
}

}  // namespace ballast
