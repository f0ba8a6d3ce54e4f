#include "examples/gpt/drive_work.h"

#include <algorithm>

#include "zero/plan/compiled_plan.h"
#include "zero/plan/op_cost.h"

namespace ballast::gpt {

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

}  // namespace ballast::gpt
