#include "zero/plan/reduction_memory.h"

#include "zero/plan/wire_codes.h"

namespace ballast {
namespace {

// As OpExecutor::reduce() makes it.
kernels::ReductionMemory memory_of_reduction(const CompileInput& input, std::size_t unit, Ranks ranks) {
  const Placement& placement = input.placement;
  const UnitLayout& layout = input.layout.units[unit];
  const bool of_shards = ranks == Ranks::shard_group;
  const kernels::ReducingRanks& group = of_shards ? input.shard_group : input.replica_group;
  const bool scatters = of_shards || placement.parameter_replicas > 1;
  const bool of_partial_sums = !of_shards && placement.ranks_per_group() > 1;
  const std::size_t width = of_partial_sums ? sizeof(float) : byte_size(input.model.units[unit].dtype);
  const std::size_t count = layout.trained.shard * (of_shards ? placement.parameter_replicas : 1);
  const Codes codes = codes_of_reduction(input.wire, placement, layout, ranks);
  if (codes.memory.bytes > 0) {
    const std::size_t part = scatters ? count : kernels::part_of_groups(count, group.ranks);
    return kernels::memory_of_codes(group, part, code_bits(codes.values), code_bits(codes.sums));
  }
  return scatters ? kernels::memory_of_scatter(group, count, width) : kernels::memory_of_sum(group, count, width);
}

}  // namespace

kernels::ReducingRanks reducing_ranks(const Placement& placement, std::size_t rank, std::size_t per_host, Ranks ranks) {
  const bool neighbours = ranks == Ranks::shard_group;
  const std::size_t of_group = placement.ranks_per_group();
  const std::size_t size = neighbours ? of_group : placement.groups();
  const std::size_t first = neighbours ? rank / of_group * of_group : rank % of_group;
  if (per_host <= 1) return {size, 1};
  const auto host = [&](std::size_t member) { return (first + member * (neighbours ? 1 : of_group)) / per_host; };
  std::size_t here = 1;
  while (here < size && host(here) == host(0)) {
    ++here;
  }
  if (here == 1 || here == size || size % here != 0) return {size, 1};
  for (std::size_t member = here; member < size; ++member) {
    const bool is_new = host(member) != host(member - 1);
    if (is_new != (member % here == 0)) return {size, 1};
  }
  return {size, here};
}

kernels::ReductionMemory memory_of_reductions(const CompileInput& input) {
  kernels::ReductionMemory memory;
  for (std::size_t unit = 0; unit < input.layout.units.size(); ++unit) {
    for (const Ranks ranks : {Ranks::shard_group, Ranks::replica_group}) {
      memory = memory.with(memory_of_reduction(input, unit, ranks));
    }
  }
  return memory;
}

}  // namespace ballast
