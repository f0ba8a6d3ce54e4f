#include "benchmarks/training/needs.h"

#include <algorithm>

#include "offload/preflight.h"
#include "zero/plan/compile.h"
#include "zero/plan/program_cost.h"

namespace ballast::benchmarks {
namespace {

// Stacks of threads, and memory that oneDNN, TBB and malloc keep: 8 to 20 MiB were measured.
constexpr std::size_t resident_of_libraries = std::size_t{10} << 20;

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
  const RecordOptions& drives = options.training.drives;
  const CompiledPlan& compiled = ballast::compiled(plan);
  if (in(Tier::nvme) > 0 && drives.run.empty())  // the files of a run may exist already
    offload::require_space(compiled.blocks().shape(compiled.tiles_on_drive()), drives.directories, options.ranks);
  return reserved + activations + resident_of_libraries;
}

}  // namespace ballast::benchmarks
