#include "zero/plan/compiled_plan.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>

#include "zero/plan/reduction_memory.h"
#include "zero/plan/tiling.h"

namespace ballast {
namespace {

std::size_t rank_in_shard_group(const PlanOptions& options) {
  check(options.placement);
  const std::size_t ranks = options.placement.ranks();
  require(options.rank < ranks, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot plan for rank {}", options.rank),
                   .needed = fmt::format("a rank below {}", ranks)};
  });
  return shard_of(options.placement, options.rank);
}

kernels::ReducingRanks group_on_gpus(const PlanOptions& options, Ranks ranks) {
  if (options.host_is_device) return {};
  return reducing_ranks(options.placement, options.rank, options.ranks_per_host, ranks);
}

}  // namespace

void require_groups(const Model& model, std::size_t groups) {
  for (const Unit& unit : model.units) {
    for (const Tensor& tensor : unit.tensors) {
      require(tensor.frozen || tensor.group < groups, Code::bad_argument, [&] {
        return Problem{.what = fmt::format("cannot train: {} parameter groups are too few", groups),
                       .where = fmt::format("unit {}, tensor {}", unit.name, tensor.name),
                       .needed = fmt::format("group {}", tensor.group)};
      });
    }
  }
}

CompiledPlan::CompiledPlan(Model model, const PlanOptions& options)
    : model_(std::move(model)),
      layout_(lay_out(model_, options.placement, options.tile_elements)),
      blocks_(model_, layout_, options.placement,
              {.format = options.format, .names = options.names, .full_records = options.full_records}),
      input_{.model = model_,
             .layout = layout_,
             .blocks = blocks_,
             .placement = options.placement,
             .rank_in_shard_group = rank_in_shard_group(options),
             .micro_steps = options.micro_steps,
             .trace = options.trace,
             .schedule = options.schedule,
             .gradient_format = options.gradient_format,
             .wire = options.wire,
             .mirror = options.mirror,
             .orthogonalization_steps = options.orthogonalization_steps,
             .host_is_device = options.host_is_device,
             .shard_group = group_on_gpus(options, Ranks::shard_group),
             .replica_group = group_on_gpus(options, Ranks::replica_group)},
      program_(compile(input_)),
      matrix_groups_(input_.needs_matrices() ? MatrixGroups(model_) : MatrixGroups()),
      rule_(options.rule),
      names_(options.names) {
  for (const Home& home : program_.homes) {
    if (home.on_drive) (home.frozen ? frozen_ : records_).emplace_back(home.unit, home.tile);
  }
}

std::size_t CompiledPlan::record_of(std::size_t unit, std::size_t tile) const {
  const auto& records = layout_.units[unit].is_frozen(tile) ? frozen_ : records_;
  return static_cast<std::size_t>(std::ranges::lower_bound(records, std::pair(unit, tile)) - records.begin());
}

}  // namespace ballast
