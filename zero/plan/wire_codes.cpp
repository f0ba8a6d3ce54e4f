#include "zero/plan/wire_codes.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include "kernels/quantize.h"

namespace ballast {
namespace {

kernels::CodeBits bits_of(WireFormat format) {
  return format == WireFormat::int4 ? kernels::CodeBits::four : kernels::CodeBits::eight;
}

std::size_t encoded(std::size_t count, WireFormat format) { return kernels::quantized_bytes(count, bits_of(format)); }

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
  if (placement.shards * placement.replicas == 1 || wire.gather == WireFormat::exact) return;
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

Codes codes_of_gather(const Wire& wire, const Section& section) {
  if (wire.gather == WireFormat::exact || section.shards == 1 || section.shard == 0) return {};
  return {.memory = {.bytes = encoded(section.shard, wire.gather)}, .values = wire.gather, .sums = wire.gather};
}

Codes codes_of_reduction(const Wire& wire, const Placement& placement, const UnitLayout& unit, Ranks ranks) {
  const bool of_shards = ranks == Ranks::shard_group;
  const std::size_t size = of_shards ? placement.shards : placement.replicas;
  if (wire.reduce == WireFormat::exact || size == 1 || unit.trained.shard == 0) return {};
  const bool of_sums = !of_shards && placement.shards > 1;  // what replicas add are sums already
  const WireFormat values = of_sums ? wire.of_sums() : wire.reduce;
  const std::size_t part = of_shards ? unit.trained.shard : kernels::part_of_groups(unit.trained.shard, size);
  return {.memory = {.bytes = size * encoded(part, values)}, .values = values, .sums = wire.of_sums()};
}

// An all_reduce hands out the sums of the parts that ranks add.
std::size_t received_bytes(const Op& op, std::size_t ranks) {
  const std::size_t bytes = op.codes.memory.bytes;
  if (op.kind == OpKind::gather) return (ranks - 1) * bytes;
  const std::size_t of_part = bytes / ranks;
  if (op.ranks == Ranks::shard_group) return (ranks - 1) * of_part;
  const std::size_t blocks = of_part / kernels::block_bytes(bits_of(op.codes.values));
  return (ranks - 1) * (of_part + blocks * kernels::block_bytes(bits_of(op.codes.sums)));
}

}  // namespace ballast
