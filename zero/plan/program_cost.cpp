#include "zero/plan/program_cost.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/runtime/sizes.h"

namespace ballast {
namespace {

void add(Ledger& ledger, Tier tier, std::string_view owner, std::size_t bytes) {
  if (bytes == 0) return;
  const auto entry =
      std::ranges::find_if(ledger, [&](const LedgerEntry& e) { return e.tier == tier && e.owner == owner; });
  if (entry == ledger.end()) {
    ledger.push_back({tier, std::string(owner), bytes});
  } else {
    entry->bytes += bytes;
  }
}

// Puts near tiers first, and the largest owner of each first.
void sort(Ledger& ledger) {
  std::ranges::stable_sort(ledger, [](const LedgerEntry& a, const LedgerEntry& b) {
    return a.tier != b.tier ? a.tier < b.tier : a.bytes > b.bytes;
  });
}

// What a rank gets from the other ones, of all that it gets.
double part_of_others(std::size_t ranks) { return static_cast<double>(ranks - 1) / static_cast<double>(ranks); }

// Encoding reads and writes once, and decoding does. The memory of a gather has the codes of all ranks.
std::size_t bytes_of_coding(const Op& op) {
  if (!op.codes.exist()) return 0;
  const std::size_t written = op.codes.memory.bytes - (op.kind == OpKind::gather ? op.codes.received : 0);
  return op.from.bytes + written + op.codes.received + op.to.bytes;
}

// Matrices are spread over the ranks, so a rank keeps about its share of what it has.
std::size_t bytes_exchanged(std::size_t shard_bytes, std::size_t shards) {
  return static_cast<std::size_t>(part_of_others(shards) * static_cast<double>(shard_bytes));
}

// A group of ranks, each host of which has as many.
struct GroupOnHosts {
  std::size_t ranks = 1;
  std::size_t ranks_of_host = 1;

  std::size_t hosts() const { return (ranks + ranks_of_host - 1) / ranks_of_host; }
};

GroupOnHosts group_on_hosts(const Op& op, const Placement& placement, const Machine& machine) {
  const bool neighbours = op.ranks == Ranks::shard_group;
  const std::size_t size = count_of(op.ranks, placement, op.parts);
  if (machine.ranks_per_host == 0) return {size, size};
  const std::size_t here = machine.ranks_per_host / (neighbours ? op.parts : placement.ranks_per_group());
  return {size, std::clamp<std::size_t>(here, 1, size)};
}

// Sums of the ranks of each host travel between hosts: in fp32, or in codes of their own.
double size_of_sums(const Op& op) {
  if (op.codes.exist()) return op.codes.values == WireFormat::int8 && op.codes.sums == WireFormat::int4 ? 0.5 : 1.0;
  return static_cast<double>(sizeof(float)) / static_cast<double>(op.value_bytes);
}

// The exchange is one in which a rank of those that share the state sends so many bytes, as many to each other one.
LinkSeconds seconds_of_exchange(double bytes, const Placement& placement, const Machine& machine) {
  if (placement.shards == 1) return {};
  const std::size_t here =
      machine.ranks_per_host == 0 ? placement.shards : std::min(machine.ranks_per_host, placement.shards);
  const double inside = bytes * static_cast<double>(here - 1) / static_cast<double>(placement.shards - 1);
  return {.inside = inside / machine.gather, .across = inside < bytes ? (bytes - inside) / machine.across : 0};
}

}  // namespace

Ledger ledger_of(const Program& program, const RecordSizes& records) {
  Ledger ledger;
  for (const Slot& slot : program.slots) {
    add(ledger, slot.tier, name(slot.role), slot.bytes);
  }
  const auto tiles = [&](bool frozen) {
    return static_cast<std::size_t>(
        std::ranges::count_if(program.homes, [&](const Home& home) { return home.on_drive && home.frozen == frozen; }));
  };
  const std::size_t on_drive = tiles(false) * records.places * records.record;
  add(ledger, Tier::nvme, "records", on_drive);
  add(ledger, Tier::nvme, "frozen", tiles(true) * records.frozen);
  const bool is_mirrored = std::ranges::find(program.slots, SlotRole::mirror, &Slot::role) != program.slots.end();
  if (is_mirrored) add(ledger, Tier::nvme, "mirror", on_drive);  // another rank's records
  sort(ledger);
  return ledger;
}

Ledger together(Ledger one, const Ledger& other) {
  for (const auto& [tier, owner, bytes] : other)
    add(one, tier, owner, bytes);
  sort(one);
  return one;
}

std::size_t bytes_in(const Ledger& ledger, Tier tier) { return bytes_by_tier(ledger)[static_cast<std::size_t>(tier)]; }

TierBytes bytes_by_tier(const Ledger& ledger) {
  TierBytes bytes{};
  for (const LedgerEntry& entry : ledger) {
    bytes[static_cast<std::size_t>(entry.tier)] += entry.bytes;
  }
  return bytes;
}

std::string to_text(const Ledger& ledger) {
  std::string text;
  for (std::size_t i = 0; i < tier_count; ++i) {
    const Tier tier = static_cast<Tier>(i);
    if (bytes_in(ledger, tier) == 0) continue;
    text += fmt::format("{:<8}{:<14}{:>12}\n", name(tier), "", human_bytes(bytes_in(ledger, tier)));
    for (const LedgerEntry& entry : ledger) {
      if (entry.tier == tier) text += fmt::format("        {:<14}{:>12}\n", entry.owner, human_bytes(entry.bytes));
    }
  }
  return text;
}

std::size_t bytes_moved(const Op& op, const Placement& placement) {
  switch (op.kind) {
    case OpKind::clear:
    case OpKind::read:
    case OpKind::read_first: return op.to.bytes;
    case OpKind::gather:
      if (passes_host(op)) return op.to.bytes;
      return op.codes.exist() ? op.codes.received : op.to.bytes - op.from.bytes;
    case OpKind::reduce: {
      if (passes_host(op)) return op.from.bytes + op.to.bytes;
      if (op.codes.exist()) return op.codes.received;
      if (placement.ranks() == 1) return op.from.bytes + op.to.bytes;
      const double part = part_of_others(count_of(op.ranks, placement, op.parts));
      const bool gathers = op.ranks == Ranks::replica_group && placement.parameter_replicas == 1;  // the sum, for all
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
    case OpKind::abandon:
    case OpKind::meet: return 0;
  }
  return 0;
}

LinkSeconds seconds_on_links(const Op& op, const Placement& placement, const Machine& machine) {
  if (op.kind == OpKind::collect || op.kind == OpKind::distribute) {
    return seconds_of_exchange(static_cast<double>(bytes_moved(op, placement)), placement, machine);
  }
  const GroupOnHosts group = group_on_hosts(op, placement, machine);
  if (group.ranks == 1) return {};
  const double inside = op.kind == OpKind::gather ? machine.gather : machine.reduce;
  const double all = static_cast<double>(bytes_moved(op, placement)) / part_of_others(group.ranks);
  const double in_host = all * part_of_others(group.ranks_of_host) / inside;
  if (group.hosts() == 1) return {.inside = in_host};
  const bool has_sums = op.kind == OpKind::reduce && group.ranks_of_host > 1;
  const double host_bytes = all * (has_sums ? size_of_sums(op) : 1.0);
  const double link_bytes = host_bytes / static_cast<double>(group.ranks_of_host) * part_of_others(group.hosts());
  return {.inside = in_host, .across = link_bytes / machine.across};
}

double seconds_of(const Op& op, const SimulationInput& input) {
  const Machine& machine = input.machine;
  const auto bytes = static_cast<double>(bytes_moved(op, input.placement));
  const auto coding = static_cast<double>(bytes_of_coding(op));
  const auto is_on_device = [&](const Piece& piece) { return input.program.slots[piece.slot].tier == Tier::device; };
  const auto memory = [&](const Piece& piece) {
    return is_on_device(piece) ? machine.device_memory : machine.host_memory;
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
      if (passes_host(op)) {
        return machine.collective_latency + bytes / (op.kind == OpKind::gather ? machine.shared : machine.host_memory);
      }
      if (op.kind == OpKind::reduce && input.placement.ranks() == 1) return bytes / memory(op.from);
      return machine.collective_latency + seconds_on_links(op, input.placement, machine).sum() +
             coding / machine.device_memory;
    case OpKind::orthogonalize: return machine.products > 0 ? op.operations / machine.products : 0;
    case OpKind::clear: return bytes / memory(op.to);
    case OpKind::momentum:
    case OpKind::norm:
    case OpKind::keep:
    case OpKind::accumulate: return bytes / memory(op.from);
    case OpKind::update:
      return bytes / std::min(memory(op.from), is_on_device(op.from) ? machine.device_updates : machine.host_updates);
    case OpKind::agree:
    case OpKind::meet: return 2 * machine.collective_latency;
    case OpKind::commit: return machine.commit_latency;
    case OpKind::abandon: return 0;
    case OpKind::use: {
      const UnitWork& work = input.work[op.unit];
      return op.phase == Phase::forward ? work.forward_seconds : work.backward_seconds;
    }
  }
  return 0;
}

double seconds_of_host_memory(const Op& op, const SimulationInput& input) {
  const bool is_there = op.lane == Lane::host || op.lane == Lane::upload || op.lane == Lane::download;
  const bool counts = !input.machine.shares_cores && input.machine.host_memory > 0;
  if (!counts || !(is_there || is_of_drives(op.lane))) return 0;
  return static_cast<double>(bytes_moved(op, input.placement)) / input.machine.host_memory;
}

}  // namespace ballast
