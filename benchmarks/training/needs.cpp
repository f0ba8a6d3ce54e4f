#include "benchmarks/training/needs.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/runtime/host_limits.h"
#include "kernels/runtime/sizes.h"
#include "offload/preflight.h"
#include "zero/plan/compile.h"
#include "zero/plan/program_cost.h"

namespace ballast::benchmarks {
namespace {

// Stacks of threads, and memory that oneDNN, TBB and malloc keep: the resident part (8 to 20 MiB were measured), and the
// address space.
constexpr std::size_t resident_of_libraries = std::size_t{10} << 20;
constexpr std::size_t space_of_libraries = std::size_t{192} << 20;

}  // namespace

DriveWork drive_work_of(const CompiledPlan& plan) {
  DriveWork work;
  for (const Op& op : plan.program().ops) {
    const std::size_t bytes = bytes_moved(op, plan.placement());
    if (op.kind == OpKind::read || op.kind == OpKind::read_first) work.read_bytes += bytes;
    if (op.kind == OpKind::write) work.written_bytes += bytes;
  }
  if (work.read_bytes + work.written_bytes == 0) return work;
  if (plan.input().mirror) work.written_bytes *= 2;  // those of another rank
  work.record_bytes = plan.blocks().records().record;
  const auto staging = std::ranges::find(plan.program().slots, SlotRole::staging, &Slot::role);
  if (staging != plan.program().slots.end()) work.records = staging->bytes / work.record_bytes;
  return work;
}

std::size_t announced_memory(const RunOptions& options, const Plan& plan) {
  const TierBytes tiers = bytes_by_tier(plan.ledger());
  const bool on_gpu = options.training.gpu.has_value();
  const auto in = [&](Tier tier) { return options.ranks * tiers[static_cast<std::size_t>(tier)]; };
  const std::size_t reserved = in(Tier::host) + (on_gpu ? 0 : in(Tier::device));
  const std::size_t activations = on_gpu ? 0 : options.ranks * llama::activation_bytes(options.model, options.batch);
  const std::optional<ResourceLimit> limit = read_host_limits().private_memory;
  const std::size_t needed = reserved + activations + space_of_libraries;
  require(!limit || needed <= limit->left(), Code::memory_budget, [&] {
    return Problem{.what = "cannot train: the run does not fit into the memory of this process",
                   .needed = fmt::format("{}: {} to reserve, {} for activations, {} for threads and libraries",
                                         human_bytes(needed), human_bytes(reserved), human_bytes(activations),
                                         human_bytes(space_of_libraries)),
                   .available = human_bytes(limit->left()),
                   .remedy =
                       "raise --memory-limit; or lower --batch, --context, --tile, --staging or --prefetch; or keep "
                       "parameters, gradients and state on drives, and update in backward"};
  });
  const RecordOptions& drives = options.training.drives;
  const CompiledPlan& compiled = plan.compiled();
  if (in(Tier::nvme) > 0 && drives.run.empty())  // the files of a run may exist already
    offload::require_space(compiled.blocks().shape(compiled.tiles_on_drive()), drives.directories, options.ranks);
  return reserved + activations + resident_of_libraries;
}

void require_kept(const ResidentMemory& resident, const RunOptions& options) {
  require(!options.memory_limit || resident.peak <= *options.memory_limit, Code::memory_budget, [&] {
    return Problem{.what = "cannot continue: more memory is resident than the limit allows",
                   .needed = human_bytes(resident.peak),
                   .available = human_bytes(*options.memory_limit)};
  });
}

}  // namespace ballast::benchmarks
