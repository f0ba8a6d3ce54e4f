#include "zero/engine/slots.h"

namespace ballast {

ExchangeViews views_of_gather(const CompiledPlan& plan, const Slots& slots, const Op& op) {
  const DType dtype = op.codes.exist() ? plan.model().units[op.unit].dtype : DType::u8;
  return {slots.view(op.from, dtype), slots.view(op.to, dtype)};
}

// Between the two reductions of a mesh, a sum is in fp32. The second one completes it and rounds it.
ExchangeViews views_of_reduction(const CompiledPlan& plan, const Slots& slots, const Op& op) {
  const Placement& placement = plan.placement();
  const DType gradient = plan.model().units[op.unit].dtype;
  const DType sum = plan.input().dtype_of_sums(op.unit);
  const bool of_shards = op.ranks == Ranks::shard_group;
  const bool is_partial = (of_shards ? placement.groups() : placement.ranks_per_group()) > 1;
  return {slots.view(op.from, is_partial && !of_shards ? DType::fp32 : gradient),
          slots.view(op.to, is_partial && of_shards ? DType::fp32 : sum)};
}

}  // namespace ballast
