// Does what an operation says, on its lane's thread.
#pragma once

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "kernels/orthogonalize.h"
#include "kernels/random_math.h"
#include "kernels/runtime/device.h"
#include "zero/comm/call.h"
#include "zero/engine/agreement.h"
#include "zero/engine/corruption_check.h"
#include "zero/engine/exchange_order.h"
#include "zero/engine/lanes.h"
#include "zero/engine/mesh.h"
#include "zero/engine/record_lane.h"
#include "zero/engine/scheduler.h"
#include "zero/engine/send_ahead.h"
#include "zero/engine/slots.h"
#include "zero/engine/step_counters.h"
#include "zero/engine/step_run.h"
#include "zero/plan/collective_memory.h"
#include "zero/plan/compile.h"

namespace ballast {

// A collective of the operation's ranks, on the lane of `op`, by which all ranks make sure that they have left the program's
// order in the same way. Throws B1007 if positions differ, or if this rank is the only one off plan: ranks that use units in
// different orders would mix up the units' memory.
// If only one rank is off plan, it makes another call here than the others, which communicators refuse.
inline void rendezvous(const Op& op, const OffPlanPosition& position, Mesh& mesh, const Model& model) {
  constexpr std::size_t words = std::tuple_size_v<OffPlanPosition>;
  const auto text = [&](const OffPlanPosition& at) -> std::string {
    if (at[1] == 0) return "calls step()";
    return fmt::format("uses unit {} in {}", model.units[static_cast<std::size_t>(at[1] - 1)].name,
                       name(static_cast<Phase>(at[2])));
  };
  Communicator& shards = op.lane == Lane::gather ? *mesh.gather : *mesh.reduce;
  Communicator& group = op.ranks == Ranks::shard_group ? shards : *mesh.replicas;
  std::vector<std::int64_t> positions(words * group.size());
  std::ranges::copy(position, positions.begin() + static_cast<std::ptrdiff_t>(words * group.rank()));
  try {
    group.all_reduce(positions, Purpose::off_plan);
  } catch (const Error& error) {
    if (error.code() != Code::wrong_size) throw;
    Problem problem = error.problem();
    problem.what = fmt::format("only this rank leaves the program's order, as it {}: {}", text(position), problem.what);
    fail(Code::out_of_order, problem);
  }
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    OffPlanPosition theirs{};
    std::copy_n(positions.begin() + static_cast<std::ptrdiff_t>(words * rank), words, theirs.begin());
    require(theirs == position, Code::out_of_order, [&] {
      return Problem{
          .what = fmt::format("rank {} of the group {} after {} uses in this step, but this rank {} after {}", rank,
                              text(theirs), theirs[0], text(position), position[0]),
          .needed = "the same uses in the same order on all ranks"};
    });
  }
}

// Brings the matrices of a unit to their homes, orthogonalizes them there, and brings them back. Each operation is called by
// its lane's thread. On a GPU the work is issued into the lane's stream.
class MatrixExecutor {
 public:
  // All of it outlives the executor.
  MatrixExecutor(const CompiledPlan& plan, Mesh& mesh, const Slots& slots, kernels::Orthogonalizer& orthogonalizer)
      : plan_(plan),
        mesh_(mesh),
        slots_(slots),
        rank_of_shard_(plan.placement().shards),
        homes_(home_matrices(plan.model(), plan.layout())),
        orthogonalizer_(orthogonalizer) {
    for (std::size_t rank = 0; rank < rank_of_shard_.size(); ++rank)
      rank_of_shard_[shard_of(plan.placement(), rank)] = rank;
    for (std::size_t unit = 0; unit < homes_.size(); ++unit) {
      parts_.push_back(parts_of(plan.model().units[unit], plan.layout().units[unit], homes_[unit],
                                plan.input().rank_in_shard_group));
    }
  }

  void collect(const Op& op) const {
    const auto& [in_shard, in_matrices] = parts_[op.unit];
    mesh_.matrices->exchange(parts<SentPart>(in_shard, op.from), parts<ReceivedPart>(in_matrices, op.to));
  }

  void distribute(const Op& op) const {
    const auto& [in_shard, in_matrices] = parts_[op.unit];
    mesh_.matrices->exchange(parts<SentPart>(in_matrices, op.from), parts<ReceivedPart>(in_shard, op.to));
  }

  // One call for the blocks of a matrix that have one shape: a batch of several matrices would depend on the number of ranks, and
  // a GPU's bits may depend on the batch.
  void orthogonalize(const Op& op, const StepNumbers& step) const {
    const View workspace = slots_.view(op.state, DType::u8);
    for (const auto& [tensor, home, begin] : homes_[op.unit].matrices) {
      if (home != plan_.input().rank_in_shard_group || step.leaves_out(op.unit, tensor)) continue;
      const Tensor& matrix = plan_.model().units[op.unit].tensors[tensor];
      for (const auto& [first, shape] : blocks_of(matrix)) {
        orthogonalizer_(values(op.to, begin + first, shape.elements()), shape, step.orthogonalizations[matrix.group],
                        workspace);
      }
    }
  }

 private:
  template <class Part>
  std::vector<Part> parts(const std::vector<MatrixPart>& of, const Piece& piece) const {
    std::vector<Part> parts;
    parts.reserve(of.size());
    for (const auto& [shard, begin, count] : of)
      parts.push_back({rank_of_shard_[shard], values(piece, begin, count)});
    return parts;
  }

  View values(const Piece& piece, std::size_t begin, std::size_t count) const {
    return slots_.view(piece, DType::bf16).part(begin, count);
  }

  const CompiledPlan& plan_;
  Mesh& mesh_;
  const Slots& slots_;
  std::vector<std::size_t> rank_of_shard_;  // each shard's rank in the group
  std::vector<UnitMatrices> homes_;         // one for each unit
  std::vector<MatrixParts> parts_;          // one for each unit
  kernels::Orthogonalizer& orthogonalizer_;
};

// run() is called by the lanes' threads, several at once; each touches the memory of its operation only.
class OpExecutor {
 public:
  // All of it outlives the executor.
  struct Parts {
    const CompiledPlan& plan;
    Mesh& mesh;
    const Slots& slots;
    const LaneArithmetic& arithmetic;
    Agreement& agreement;
    StepCounters& counters;
    FirstFailure& failure;
    ExchangeTurns& exchanges;
    const RecordLane* records = nullptr;       // null: no operation reads or writes records
    CorruptionCheck* check = nullptr;          // makes the updates, if there is one
    const MatrixExecutor* matrices = nullptr;  // null: no rule needs whole matrices
    SendAhead* ahead = nullptr;                // null: no exchange is sent ahead
  };
  explicit OpExecutor(const Parts& parts) : parts_(parts) {}

  // Waits for what the operation waits for, then does it; on a GPU, issues it. An error is the engine's first failure.
  void run(const IssuedOp& issued) const {
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
      issued.status.is_checked = false;
      issued.status.written = {};
      if (parts_.ahead != nullptr) parts_.ahead->begun(op);
      context.stream() != nullptr ? issue_to_gpu(issued, *context.stream()) : execute(op, issued.status, issued.run);
    } catch (...) {
      if (parts_.records != nullptr) parts_.records->leave_turns();
      parts_.failure.fail(op);
    }
    if (context.stream() == nullptr) parts_.counters.count(op, start, std::chrono::steady_clock::now());
  }

 private:
  static bool uses_record(const Op& op) {
    return op.kind == OpKind::momentum || op.kind == OpKind::update || op.kind == OpKind::upload ||
           op.kind == OpKind::keep || op.kind == OpKind::write;
  }

  // All ranks skip the same step, and so its exchanges too.
  static bool changes_state(OpKind kind) {
    switch (kind) {
      case OpKind::momentum:
      case OpKind::collect:
      case OpKind::orthogonalize:
      case OpKind::distribute:
      case OpKind::update:
      case OpKind::write: return true;
      default: return false;
    }
  }

  // A skipped step of a round of joint runs is committed like any other: its records are written as they are.
  static bool is_skipped(OpKind kind, const StepRun& run) {
    return run.numbers.skip && !(kind == OpKind::write && run.round.exists());
  }

  // Exchanges between GPUs must run in the same order on all ranks. If ranks run two of them in different orders, both may
  // wait for each other, because they may be unable to run at once. So they are issued in the order in which the trainer frees
  // them, and each waits on the GPU for the one before it, which another stream may have.
  void issue_to_gpu(const IssuedOp& issued, const Stream& stream) const {
    OpStatus& status = issued.status;
    const ProfilerRange range(label(issued.op, parts_.plan.model()));
    std::optional<ExchangeTurns::Current> turn;
    if (issued.takes_turns) turn.emplace(parts_.exchanges, &status, stream);
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
    if (turn) turn->issued(status.on_gpu);
  }

  // A skipped step changes nothing, but reads its records, because the next step expects them in memory as after any
  // other. Only operations that wait for the agreement may check whether it is skipped.
  void execute(const Op& op, OpStatus& status, StepRun& run) const {
    if (op.phase == Phase::step && changes_state(op.kind) && is_skipped(op.kind, run)) return;
    execute_in_any_step(op, status, run);
  }

  void execute_in_any_step(const Op& op, OpStatus& status, StepRun& run) const {
    const Arithmetic& arithmetic = parts_.arithmetic.of(op.lane);
    switch (op.kind) {
      case OpKind::clear: return arithmetic.clear(op);
      case OpKind::upload:
      case OpKind::download:
      case OpKind::keep: return arithmetic.copy(op);
      case OpKind::gather: return gather(op);
      case OpKind::reduce: return reduce(op, run.step);
      case OpKind::accumulate: return arithmetic.accumulate(op, run.step);
      case OpKind::norm: return arithmetic.add_squares(op);
      case OpKind::agree: return parts_.agreement.agree(op, run, parts_.counters.own_seconds());
      case OpKind::update: return update(op, run.numbers);
      case OpKind::momentum: return arithmetic.make_direction(op, run.numbers);
      case OpKind::collect: return parts_.matrices->collect(op);
      case OpKind::orthogonalize: return parts_.matrices->orthogonalize(op, run.numbers);
      case OpKind::distribute: return parts_.matrices->distribute(op);
      case OpKind::read:
      case OpKind::read_first: status.read = parts_.records->read(op); return;
      case OpKind::write: status.written = parts_.records->write(op); return;
      case OpKind::commit: return commit(run);
      case OpKind::abandon: return abandon();
      case OpKind::meet: return rendezvous(op, run.position, parts_.mesh, parts_.plan.model());
      case OpKind::use: return;
    }
  }

  void commit(const StepRun& run) const {
    const bool is_left_out = run.numbers.skip && !run.round.exists();
    is_left_out ? parts_.records->abandon() : parts_.records->commit({run.numbers.number, run.note, run.round});
  }

  void abandon() const {
    parts_.records->abandon();
    if (parts_.check != nullptr) parts_.check->forget();  // what updates have left is gone
  }

  void gather(const Op& op) const {
    const auto [mine, all] = views_of_gather(parts_.plan, parts_.slots, op);
    if (passes_host(op)) return parts_.mesh.upload->all_gather(mine, all);
    Communicator& neighbours = op.parts > 1 ? *parts_.mesh.gather_part : *parts_.mesh.gather;
    Communicator& group = op.ranks == Ranks::shard_group ? neighbours : *parts_.mesh.replicas;
    op.codes.exist() ? group.all_gather(mine, all, encoding_of(op)) : group.all_gather(mine, all);
  }

  void reduce(const Op& op, std::uint64_t step) const {
    if (parts_.plan.placement().ranks() == 1) return parts_.arithmetic.of(op.lane).reduce_alone(op);
    const auto [from, to] = views_of_reduction(parts_.plan, parts_.slots, op);
    if (passes_host(op)) return parts_.mesh.host->reduce_scatter(from, to);
    Communicator& group = reducing(op);
    group.use_memory(parts_.slots.all_of(SlotRole::received), parts_.slots.all_of(SlotRole::host_sums));
    if (op.codes.exist()) return reduce_encoded(op, step, {from, to});
    scatters(op) ? group.reduce_scatter(from, to) : group.all_reduce(from, to);
  }

  Communicator& reducing(const Op& op) const {
    Communicator& neighbours = op.parts > 1 ? *parts_.mesh.reduce_part : *parts_.mesh.reduce;
    return op.ranks == Ranks::shard_group ? neighbours : *parts_.mesh.replicas;
  }

  // Random bits belong to elements of tensors. Each sum of a unit in a step has its own, and in a mesh each group of ranks.
  void reduce_encoded(const Op& op, std::uint64_t step, const ExchangeViews& views) const {
    const bool is_shard_group = op.ranks == Ranks::shard_group;
    const bool adds_sums = !is_shard_group && parts_.mesh.reduce->size() > 1;
    const UnitLayout& layout = parts_.plan.layout().units[op.unit];
    const Range range = adds_sums ? parts_.plan.input().kept_range(layout.trained) : Range{0, layout.trained.count()};
    const std::vector<kernels::Run> tensors = runs_in(parts_.plan.model().units[op.unit], layout, range);
    Encoding encoding = encoding_of(op);
    encoding.tensors = tensors;
    encoding.first_index = range.first;
    encoding.stream = kernels::rounding_stream(kernels::seed_of_wire, op.sum, step);
    const std::size_t copy = op.parts > 1 ? parts_.mesh.rank() % op.parts : parts_.mesh.replicas->rank();
    const std::size_t group = is_shard_group ? copy : parts_.mesh.reduce->rank();
    encoding.stream = kernels::mix(encoding.stream + 2 * group + (adds_sums ? 1 : 0));
    Communicator& ranks = reducing(op);
    scatters(op) ? ranks.reduce_scatter(views.from, views.to, encoding)
                 : ranks.all_reduce(views.from, views.to, encoding);
  }

  // Whether each rank of a reduction gets a part of the sum. Replicas of the state need all of it.
  bool scatters(const Op& op) const {
    return op.ranks == Ranks::shard_group || parts_.plan.placement().parameter_replicas > 1;
  }

  Encoding encoding_of(const Op& op) const {
    return {.values = code_bits(op.codes.values),
            .sums = code_bits(op.codes.sums),
            .memory = parts_.slots.view(op.codes.memory, DType::u8)};
  }

  void update(const Op& op, const StepNumbers& step) const {
    const Arithmetic& arithmetic = parts_.arithmetic.of(op.lane);
    parts_.check != nullptr ? parts_.check->update(op, step, arithmetic) : arithmetic.update(op, step);
  }

  Parts parts_;
};

}  // namespace ballast
