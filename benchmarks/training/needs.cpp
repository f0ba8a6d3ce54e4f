#include "benchmarks/training/needs.h"

#include <fmt/format.h>

#include <algorithm>

#include "benchmarks/training/run.h"
#include "examples/llama/llama.h"
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

Needs needs_of(const RunOptions& options, const Plan& plan) {
  const TrainingOptions& training = options.training;
  const TierBytes tiers = bytes_by_tier(plan.ledger());
  const auto in = [&](Tier tier) { return options.memory.ranks_here * tiers[static_cast<std::size_t>(tier)]; };
  Needs needs{.reserved = in(Tier::host), .on_drives = in(Tier::nvme)};
  if (!training.gpu) {
    needs.reserved += in(Tier::device);
    needs.activations = options.memory.ranks_here * llama::activation_bytes(options.model, options.batch);
    needs.libraries = resident_of_libraries;
  }
  if (needs.on_drives == 0) return needs;
  for (const std::filesystem::path& directory : training.drives.directories) {
    needs.drives.push_back({directory, std::filesystem::space(directory).available});
  }
  return needs;
}

void require_enough(const Needs& needs, const RunOptions& options, const Plan& plan) {
  const std::optional<PrivateMemory> limit = read_host_limits().private_memory;
  const std::size_t needed = needs.reserved + needs.activations + space_of_libraries;
  require(!limit || needed <= limit->available_bytes(), Code::memory_budget, [&] {
    return Problem{.what = "cannot train: the run does not fit into the memory of this process",
                   .needed = fmt::format("{}: {} to reserve, {} for activations, {} for threads and libraries",
                                         human_bytes(needed), human_bytes(needs.reserved),
                                         human_bytes(needs.activations), human_bytes(space_of_libraries)),
                   .available = human_bytes(limit->available_bytes()),
                   .remedy =
                       "raise --memory-limit; or lower --batch, --context, --tile, --staging or --prefetch; or keep "
                       "parameters, gradients and state on drives, and update in backward"};
  });
  const RecordOptions& drives = options.training.drives;
  if (needs.on_drives == 0 || !drives.run.empty()) return;  // the files of a run may exist already
  const CompiledPlan& compiled = plan.compiled();
  offload::require_space(compiled.blocks().shape(compiled.tiles_on_drive()), drives.directories,
                         options.memory.ranks_here);
}

void require_kept(const ResidentMemory& resident, const MemoryOptions& options) {
  require(!options.limit || resident.peak <= *options.limit, Code::memory_budget, [&] {
    return Problem{.what = "cannot continue: more memory is resident than the limit allows",
                   .needed = human_bytes(resident.peak),
                   .available = human_bytes(*options.limit)};
  });
}

double excess(const ResidentMemory& resident, const Needs& needs, const MemoryOptions& options) {
  const std::size_t before = options.before.now - options.before.of_files;
  const auto own = static_cast<double>(resident.peak - resident.of_files) - static_cast<double>(before);
  return own / static_cast<double>(needs.memory()) - 1.0;
}

}  // namespace ballast::benchmarks
