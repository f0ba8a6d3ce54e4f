#include "zero/engine/op_executor.h"

#include <chrono>

#include "kernels/runtime/profiler_range.h"

namespace ballast {
namespace {

bool uses_record(const Op& op) {
  return op.kind == OpKind::update || op.kind == OpKind::upload || op.kind == OpKind::write;
}

}  // namespace

void OpExecutor::run(const IssuedOp& issued) const {
  const Op& op = issued.op;
  const ExecContext& context = parts_.arithmetic.of(op.lane).context();
  auto start = std::chrono::steady_clock::now();
  try {
    for (const OpStatus* other : issued.after) {
      other->wait_in(context);
    }
    start = std::chrono::steady_clock::now();
    for (const OpStatus* other : issued.after) {
      if (uses_record(op)) other->check_record();
    }
    issued.status.read.reset();
    issued.status.written = {};
    context.stream() != nullptr ? issue_to_gpu(issued, *context.stream()) : execute(op, issued.status, issued.run);
  } catch (...) {
    parts_.failure.fail(op);
  }
  if (context.stream() == nullptr) parts_.counters.count(op, start, std::chrono::steady_clock::now());
}

// Exchanges between GPUs must run in the program's order on all ranks. If ranks run two of them in different orders, both
// may wait for each other, because they may be unable to run at once. So they are issued in that order, and each waits
// on the GPU for the one before it, which another stream may have.
void OpExecutor::issue_to_gpu(const IssuedOp& issued, const Stream& stream) const {
  OpStatus& status = issued.status;
  const ProfilerRange range(label(issued.op, parts_.plan.model()));
  if (issued.ticket != none) {
    parts_.sequencer.await(issued.ticket);
    parts_.exchanges.wait_in(stream);
  }
  const bool timed = parts_.counters.times_gpu();
  status.in_stream = true;
  if (!status.on_gpu && (timed || status.is_awaited)) status.on_gpu = std::make_shared<GpuSpan>(stream.gpu(), timed);
  if (status.on_gpu) {
    status.on_gpu->counted = false;
    status.on_gpu->mark_begin(stream);
  }
  execute(issued.op, status, issued.run);
  if (status.on_gpu) status.on_gpu->end.record(stream);
  if (!timed) parts_.counters.count_bytes(issued.op);
  if (issued.ticket != none) {
    parts_.exchanges.end_in(stream, status.on_gpu);
    parts_.sequencer.done();
  }
}

// A skipped step changes nothing, but reads its records, because the next step expects them in memory as after any
// other. Only operations that wait for the agreement may check whether it is skipped.
void OpExecutor::execute(const Op& op, OpStatus& status, StepRun& run) const {
  const bool changes_state = op.kind == OpKind::update || op.kind == OpKind::write || op.kind == OpKind::keep;
  if (op.phase == Phase::step && changes_state && run.numbers.skip) return;
  if (op.phase == Phase::step && op.kind == OpKind::commit && run.numbers.skip) return parts_.records->abandon();
  execute_in_any_step(op, status, run);
}

void OpExecutor::execute_in_any_step(const Op& op, OpStatus& status, StepRun& run) const {
  const Arithmetic& arithmetic = parts_.arithmetic.of(op.lane);
  switch (op.kind) {
    case OpKind::clear: return arithmetic.clear(op);
    case OpKind::upload:
    case OpKind::download:
    case OpKind::keep: return arithmetic.copy(op);
    case OpKind::gather: return gather(op);
    case OpKind::reduce: return reduce(op);
    case OpKind::accumulate: return arithmetic.accumulate(op, run.step);
    case OpKind::norm: return arithmetic.add_squares(op);
    case OpKind::agree: return parts_.agreement.agree(op, run, parts_.counters.own_seconds());
    case OpKind::update: return update(op, run.numbers);
    case OpKind::read:
    case OpKind::read_first: status.read = parts_.records->read(op); return;
    case OpKind::write: status.written = parts_.records->write(op); return;
    case OpKind::commit: return parts_.records->commit({run.numbers.number, run.note});
    case OpKind::meet: return rendezvous(op, run.position, parts_.mesh, parts_.plan.model());
    case OpKind::use: return;
  }
}

void OpExecutor::gather(const Op& op) const {
  parts_.mesh.gather->all_gather(parts_.slots.view(op.from, DType::u8), parts_.slots.view(op.to, DType::u8));
}

void OpExecutor::reduce(const Op& op) const {
  const Placement& placement = parts_.plan.placement();
  const DType gradient = parts_.plan.model().units[op.unit].dtype;
  const DType sum = parts_.plan.input().dtype_of_sums(op.unit);
  const auto view = [&](const Piece& piece, DType dtype) { return parts_.slots.view(piece, dtype); };
  if (op.ranks == Ranks::shard_group) {
    const bool is_partial = placement.replicas > 1;  // another reduction completes the sum, and rounds it
    parts_.mesh.reduce->reduce_scatter(view(op.from, gradient), view(op.to, is_partial ? DType::fp32 : sum));
  } else {
    const bool is_partial = placement.shards > 1;
    parts_.mesh.replicas->all_reduce(view(op.from, is_partial ? DType::fp32 : gradient), view(op.to, sum));
  }
}

void OpExecutor::update(const Op& op, const StepNumbers& step) const {
  const Arithmetic& arithmetic = parts_.arithmetic.of(op.lane);
  parts_.check != nullptr ? parts_.check->update(op, step, arithmetic) : arithmetic.update(op, step);
}

}  // namespace ballast
