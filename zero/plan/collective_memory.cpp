#include "zero/plan/collective_memory.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <vector>

namespace ballast {
namespace {

void check_formats(const Wire& wire) {
  require(wire.gather != WireFormat::int4, Code::unsupported, [] {
    return Problem{.what = "cannot send gathered parameters as int4: they would lose too much",
                   .needed = "wire.gather of int8 or exact"};
  });
  require(!wire.across || (*wire.across == WireFormat::exact) == (wire.reduce == WireFormat::exact), Code::unsupported,
          [&] {
            return Problem{.what = fmt::format("cannot send gradients as {} and sums of them as {}", name(wire.reduce),
                                               name(*wire.across)),
                           .needed = "wire.reduce and wire.across of int8 or int4, or both exact"};
          });
}

// A reduction of a unit's gradients: what a rank adds, and what it gets.
struct Reduced {
  Reduced(const Placement& placement, const UnitLayout& unit, Ranks ranks)
      : is_shard_group(ranks == Ranks::shard_group),
        scatters(is_shard_group || placement.parameter_replicas > 1),
        adds_sums(!is_shard_group && placement.ranks_per_group() > 1),
        count(unit.trained.shard * (is_shard_group ? placement.parameter_replicas : 1)) {}

  bool is_shard_group;
  bool scatters;      // a part for each rank; else all ranks get the sum
  bool adds_sums;     // replicas add sums of groups
  std::size_t count;  // elements: in each part, or in all
};

// OpExecutor::reduce() makes the same.
kernels::ReductionMemory memory_of_reduction(const CompileInput& input, const kernels::ReducingRanks& group,
                                             std::size_t unit, Ranks ranks) {
  const UnitLayout& layout = input.layout.units[unit];
  const Reduced reduced(input.placement, layout, ranks);
  const std::size_t width = reduced.adds_sums ? sizeof(float) : input.width(unit);
  const Codes codes = codes_of_reduction(input.wire, input.placement, layout, ranks);
  if (codes.memory.bytes > 0) {
    const std::size_t part = reduced.scatters ? reduced.count : kernels::part_of_groups(reduced.count, group.ranks);
    return kernels::memory_of_codes(group, part, code_bits(codes.values), code_bits(codes.sums));
  }
  return reduced.scatters ? kernels::memory_of_scatter(group, reduced.count, width)
                          : kernels::memory_of_sum(group, reduced.count, width);
}

}  // namespace

void check(const Wire& wire, const Placement& placement) {
  check_formats(wire);
  if (placement.ranks() == 1 || wire.gather == WireFormat::exact) return;
  require(!placement.full_parameters, Code::unsupported, [&] {
    return Problem{
        .what = fmt::format("cannot send gathered parameters as {}: below stage 3 ranks keep full parameters, and each "
                            "updates its exact shard in them",
                            name(wire.gather)),
        .needed = "stage 3, or wire.gather exact",
        .remedy = "Use stage 3, or leave out gather: wire={\"reduce\": \"int8\"}."};
  });
  require(placement.shards > 1, Code::unsupported, [&] {
    return Problem{
        .what = fmt::format("cannot send gathered parameters as {}: each rank keeps all of them, so none are "
                            "gathered",
                            name(wire.gather)),
        .needed = "fewer replicas than ranks, or wire.gather exact"};
  });
}

kernels::CodeBits code_bits(WireFormat format) {
  return format == WireFormat::int4 ? kernels::CodeBits::four : kernels::CodeBits::eight;
}

Codes codes_of_gather(const Wire& wire, const Section& section) {
  if (wire.gather == WireFormat::exact || section.shards == 1 || section.shard == 0) return {};
  const kernels::CodeBits bits = code_bits(wire.gather);
  return {.memory = {.bytes = kernels::encoded_parts_bytes(section.shard, section.shards, bits)},
          .received = (section.shards - 1) * kernels::encoded_part_bytes(section.shard, bits),
          .values = wire.gather,
          .sums = wire.gather};
}

Codes codes_of_reduction(const Wire& wire, const Placement& placement, const UnitLayout& unit, Ranks ranks) {
  const std::size_t size = count_of(ranks, placement, unit.trained.parts);
  const Reduced reduced(placement, unit, ranks);
  if (wire.reduce == WireFormat::exact || size == 1 || reduced.count == 0) return {};
  Codes codes{.values = reduced.adds_sums ? wire.sums() : wire.reduce, .sums = wire.sums()};
  const kernels::CodeBits values = code_bits(codes.values);
  const kernels::CodeBits sums = code_bits(codes.sums);
  if (reduced.scatters) {
    codes.memory.bytes = kernels::encoded_parts_bytes(reduced.count, size, values);
    codes.received = (size - 1) * kernels::quantized_bytes(reduced.count, values);
  } else {  // each rank adds a part, and then gets the sums of the others
    const std::size_t part = kernels::part_of_groups(reduced.count, size);
    codes.memory.bytes = kernels::encoded_all_reduce_bytes(reduced.count, size, values, sums);
    codes.received = (size - 1) * (kernels::quantized_bytes(part, values) + kernels::encoded_part_bytes(part, sums));
  }
  return codes;
}

kernels::ReducingRanks reducing_ranks(const Placement& placement, std::size_t rank, std::size_t per_host, Ranks ranks,
                                      std::size_t parts) {
  const bool neighbours = ranks == Ranks::shard_group;
  const std::size_t group = placement.ranks_per_group();
  const std::size_t size = count_of(ranks, placement, parts);
  const std::size_t first = neighbours ? rank / group * group + rank % parts : rank % group;
  if (per_host <= 1) return {size, 1};
  std::vector<std::size_t> hosts;
  for (std::size_t member = 0; member < size; ++member)
    hosts.push_back((first + member * (neighbours ? parts : group)) / per_host);
  return {size, kernels::ranks_per_host(hosts)};
}

kernels::ReductionMemory memory_of_reductions(const CompileInput& input) {
  kernels::ReductionMemory memory;
  if (input.host_is_device) return memory;
  for (const Ranks ranks : {Ranks::shard_group, Ranks::replica_group}) {
    const auto with_parts = [&](std::size_t parts) {
      return reducing_ranks(input.placement, input.rank, input.ranks_per_host, ranks, parts);
    };
    const kernels::ReducingRanks all = with_parts(1);
    for (std::size_t unit = 0; unit < input.layout.units.size(); ++unit) {
      const std::size_t parts = input.layout.units[unit].trained.parts;
      memory = memory.with(memory_of_reduction(input, parts == 1 ? all : with_parts(parts), unit, ranks));
    }
  }
  return memory;
}

}  // namespace ballast
