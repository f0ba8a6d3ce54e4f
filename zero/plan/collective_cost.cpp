#include "zero/plan/collective_cost.h"

#include <algorithm>

#include "zero/plan/op_cost.h"

namespace ballast {
namespace {

// A group of ranks, each host of which has as many.
struct GroupOnHosts {
  std::size_t ranks = 1;
  std::size_t ranks_of_host = 1;

  std::size_t hosts() const { return (ranks + ranks_of_host - 1) / ranks_of_host; }
};

GroupOnHosts group_on_hosts(Ranks ranks, const Placement& placement, const Machine& machine) {
  const bool neighbours = ranks == Ranks::shard_group;
  const std::size_t size = neighbours ? placement.ranks_per_group() : placement.groups();
  if (machine.ranks_per_host == 0) return {size, size};
  const std::size_t of_host =
      neighbours ? machine.ranks_per_host : machine.ranks_per_host / placement.ranks_per_group();
  return {size, std::clamp<std::size_t>(of_host, 1, size)};
}

// Between hosts there are sums of the ranks of each host: in fp32, or in codes of their own.
double size_of_sums(const Op& op) {
  if (op.codes.exist()) return op.codes.values == WireFormat::int8 && op.codes.sums == WireFormat::int4 ? 0.5 : 1.0;
  return static_cast<double>(sizeof(float)) / static_cast<double>(op.value_bytes);
}

// Of an exchange in which a rank of those that share the state sends so many bytes, as many to each other one.
LinkSeconds seconds_of_exchange(double bytes, const Placement& placement, const Machine& machine) {
  if (placement.shards == 1) return {};
  const std::size_t of_host =
      machine.ranks_per_host == 0 ? placement.shards : std::min(machine.ranks_per_host, placement.shards);
  const double inside = bytes * static_cast<double>(of_host - 1) / static_cast<double>(placement.shards - 1);
  return {.inside = inside / machine.gather, .across = inside < bytes ? (bytes - inside) / machine.across : 0};
}

}  // namespace

double part_of_others(std::size_t ranks) { return static_cast<double>(ranks - 1) / static_cast<double>(ranks); }

LinkSeconds seconds_on_links(const Op& op, const Placement& placement, const Machine& machine) {
  if (op.kind == OpKind::collect || op.kind == OpKind::distribute) {
    return seconds_of_exchange(static_cast<double>(bytes_moved(op, placement)), placement, machine);
  }
  const GroupOnHosts group = group_on_hosts(op.ranks, placement, machine);
  if (group.ranks == 1) return {};
  const double inside = op.kind == OpKind::gather ? machine.gather : machine.reduce;
  const double all = static_cast<double>(bytes_moved(op, placement)) / part_of_others(group.ranks);
  const double in_host = all * part_of_others(group.ranks_of_host) / inside;
  if (group.hosts() == 1) return {.inside = in_host};
  const bool has_sums = op.kind == OpKind::reduce && group.ranks_of_host > 1;
  const double of_host = all * (has_sums ? size_of_sums(op) : 1.0);
  const double of_a_link = of_host / static_cast<double>(group.ranks_of_host) * part_of_others(group.hosts());
  return {.inside = in_host, .across = of_a_link / machine.across};
}

}  // namespace ballast
