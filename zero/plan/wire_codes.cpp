#include "zero/plan/wire_codes.h"

#include <ballast/error.h>

#include <fmt/format.h>

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
  const bool of_shards = ranks == Ranks::shard_group;
  const std::size_t size = of_shards ? placement.ranks_per_group() : placement.groups();
  const bool scatters = of_shards || placement.parameter_replicas > 1;
  const std::size_t count = unit.trained.shard * (of_shards ? placement.parameter_replicas : 1);
  if (wire.reduce == WireFormat::exact || size == 1 || count == 0) return {};
  const bool of_sums = !of_shards && placement.ranks_per_group() > 1;  // replicas add sums of groups
  Codes codes{.values = of_sums ? wire.of_sums() : wire.reduce, .sums = wire.of_sums()};
  const kernels::CodeBits values = code_bits(codes.values);
  const kernels::CodeBits sums = code_bits(codes.sums);
  if (scatters) {
    codes.memory.bytes = kernels::encoded_parts_bytes(count, size, values);
    codes.received = (size - 1) * kernels::quantized_bytes(count, values);
  } else {  // each rank adds a part, and then gets the sums of the others
    const std::size_t part = kernels::part_of_groups(count, size);
    codes.memory.bytes = kernels::encoded_all_reduce_bytes(count, size, values, sums);
    codes.received = (size - 1) * (kernels::quantized_bytes(part, values) + kernels::encoded_part_bytes(part, sums));
  }
  return codes;
}

}  // namespace ballast
