// What operations do. All of this runs on the lanes' threads.
#include <fmt/format.h>

#include <chrono>

#include "kernels/runtime/profiler_range.h"
#include "zero/engine/engine.h"

namespace ballast {

namespace {

// What is being handled, with where it happened.
[[noreturn]] void rethrow_from(const Op& op, const Model& model) {
  try {
    throw;
  } catch (const Error& error) {
    const std::string unit = op.unit == none ? "" : fmt::format("unit {}, ", model.units[op.unit].name);
    Problem problem = error.problem();
    problem.where = fmt::format("{}{} of {}{}{}", unit, name(op.kind), name(op.phase),
                                problem.where.empty() ? "" : "; ", problem.where);
    fail(error.code(), problem);
  }
}

std::string text_of_what_is_handled() {
  try {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an unknown error";
  }
}

}  // namespace

// An error says where it happened, and nobody waits for this rank any more.
void Engine::fail_op(const Op& op) {
  sequencer_.cancel();
  {
    const std::lock_guard lock(error_mutex_);
    if (error_) throw;  // it has been said: this one waited for what failed, or was aborted with it
  }
  try {
    rethrow_from(op, parts_.plan.model());
  } catch (...) {
    {
      const std::lock_guard lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
    }
    parts_.mesh.abort(text_of_what_is_handled());
    throw;
  }
}

void Engine::run(const Issued& issued) {
  const auto& [op, status, round, after, turn] = issued;
  const ExecContext& context = arithmetic(op.lane).context();
  auto start = std::chrono::steady_clock::now();
  try {
    for (const OpStatus* other : after) {
      other->wait_in(context);
    }
    start = std::chrono::steady_clock::now();
    const bool uses_record = op.kind == OpKind::update || op.kind == OpKind::upload || op.kind == OpKind::write;
    for (const OpStatus* other : after) {
      if (uses_record && other->read) other->read->payload();  // checks it
    }
    status.read.reset();
    status.written = {};
    context.stream() != nullptr ? issue_to_gpu(issued, *context.stream()) : run_by_phase(op, status, round);
  } catch (...) {
    fail_op(op);
  }
  if (context.stream() == nullptr) count(op, start, std::chrono::steady_clock::now());
}

// What one rank's GPU exchanges with others' has to be begun in one order on all of them, that of the program: two exchanges
// that are begun in another order elsewhere may wait for each other, if nothing lets both of them run at once.
void Engine::issue_to_gpu(const Issued& issued, const Stream& stream) {
  const auto& [op, status, round, after, turn] = issued;
  const ProfilerRange range(label(op, parts_.plan.model()));
  if (turn != none) sequencer_.await(turn);
  if (!status.on_gpu) status.on_gpu = std::make_shared<GpuSpan>(stream.gpu());
  status.on_gpu->counted = false;
  status.on_gpu->begin.record(stream);
  run_by_phase(op, status, round);
  status.on_gpu->end.record(stream);
  if (turn != none) sequencer_.done();
}

void Engine::run_by_phase(const Op& op, OpStatus& status, Round& round) {
  op.phase == Phase::step ? run_in_step(op, status, round) : run_any(op, status, round);
}

// A step that is skipped reads, for the next one finds in memory what it would find after any other; and changes nothing.
// Only what waits for the agreement may ask whether it is skipped.
void Engine::run_in_step(const Op& op, OpStatus& status, Round& round) {
  switch (op.kind) {
    case OpKind::update:
    case OpKind::write:
    case OpKind::keep:
      if (round.numbers.skip) return;
      break;
    case OpKind::commit:
      if (round.numbers.skip) return records_->abandon();
      break;
    default: break;
  }
  run_any(op, status, round);
}

void Engine::run_any(const Op& op, OpStatus& status, Round& round) {
  const Arithmetic& arithmetic = this->arithmetic(op.lane);
  switch (op.kind) {
    case OpKind::clear: return arithmetic.clear(op);
    case OpKind::upload:
    case OpKind::download:
    case OpKind::keep: return arithmetic.copy(op);
    case OpKind::gather: {
      const DType bytes = DType::u8;
      return parts_.mesh.gather->all_gather(slots_.view(op.from, bytes), slots_.view(op.to, bytes));
    }
    case OpKind::reduce: return reduce(op);
    case OpKind::accumulate: return arithmetic.accumulate(op);
    case OpKind::norm: return arithmetic.add_squares(op);
    case OpKind::agree: return agree(op, round);
    case OpKind::update:
      return corruption_check_ ? corruption_check_->update(op, round.numbers, arithmetic)
                               : arithmetic.update(op, round.numbers);
    case OpKind::read:
    case OpKind::read_first: status.read = records_->read(op); return;
    case OpKind::write: status.written = records_->write(op); return;
    case OpKind::commit: return records_->commit(round.numbers.number);
    case OpKind::meet: return meet(op, round);
    case OpKind::use: return;
  }
}

void Engine::reduce(const Op& op) {
  const DType dtype = is_partial(op) ? DType::fp32 : parts_.plan.model().units[op.unit].dtype;
  const View from = slots_.view(op.from, dtype);
  const View to = slots_.view(op.to, DType::fp32);
  Communicator& group = op.ranks == Ranks::shard_group ? *parts_.mesh.reduce : *parts_.mesh.replicas;
  op.ranks == Ranks::shard_group ? group.reduce_scatter(from, to) : group.all_reduce(from, to);
}

// What comes from another reduction is summed in fp32 already.
bool Engine::is_partial(const Op& op) const {
  const Placement& placement = parts_.plan.placement();
  return op.ranks == Ranks::replica_group && placement.shards > 1;
}

optim::Decision Engine::decide(const kernels::ExactSum& squares) const {
  const Placement& placement = parts_.plan.placement();
  const std::size_t sums = placement.shards * placement.replicas * parts_.plan.input().micro_steps;
  return optim::decide({.sum_of_squares = kernels::value(squares),
                        .loss_scale = options_.loss_scale,
                        .averaged_over = static_cast<double>(sums)},
                       options_.max_norm);
}

StepNumbers Engine::numbers_of(const optim::Decision& decision) const {
  StepNumbers numbers{.number = steps_ + (decision.skip ? 0u : 1u),
                      .skip = decision.skip,
                      .gradient_factor = decision.gradient_factor,
                      .groups = {}};
  for (const optim::Rule& rule : rules_) {
    const std::size_t group = numbers.groups.size();
    const std::uint64_t before = group < begun_at_.size() ? begun_at_[group] : 0;
    numbers.groups.push_back(
        optim::at(rule, {.number = steps_ + 1 - before, .gradient_factor = decision.gradient_factor}));
  }
  return numbers;
}

// Of what each has summed of its shards.
void Engine::sum_over_shards(std::span<kernels::ExactSum> squares) const {
  parts_.mesh.reduce->all_reduce(
      {reinterpret_cast<std::int64_t*>(squares.data()), squares.size() * kernels::exact_sum_words});
}

// The same, with what other ranks have of parts of the model that are not here.
kernels::ExactSum Engine::sum_over_model(const kernels::ExactSum& squares) const {
  kernels::ExactSum sum = squares;
  sum_over_shards({&sum, 1});
  if (parts_.mesh.norm != nullptr) {
    parts_.mesh.norm->all_reduce({reinterpret_cast<std::int64_t*>(&sum), kernels::exact_sum_words});
  }
  return sum;
}

void Engine::agree(const Op& op, Round& round) {
  kernels::ExactSum sum;  // what this rank has summed, on the device and on the host
  if (op.to.exists()) kernels::merge(sum, arithmetic(op.lane).take_sum(op.to));
  if (op.state.exists()) kernels::merge(sum, arithmetic(Lane::host).take_sum(op.state));
  optim::Decision decision = decide(sum_over_model(sum));
  const bool is_finite = !decision.skip;
  decision.skip = decision.skip || options_.discard;
  round.result = {.norm = decision.norm, .pace = find_straggler(parts_.mesh, own_seconds_)};
  if (!updates_in_backward_) {
    round.numbers = numbers_of(decision);
    round.result.skipped = decision.skip;
    if (!is_finite) {
      round.result.reason = "the gradients are not finite, first in " + first_wrong_parameter(*round.list);
    } else if (decision.skip) {
      round.result.reason = "the gradients were discarded";
    }
  } else if (decision.skip) {  // updates are made already, nothing can be skipped any more
    round.result.reason = "the gradients were not finite, and parameters were updated with them";
  }
  round.result.step = round.numbers.number;
}

// Over all shards: the rank that has the first one says it.
std::string Engine::first_wrong_parameter(const std::vector<Op>& list) const {
  const Communicator& group = *parts_.mesh.reduce;
  std::vector<std::int64_t> found(2 * group.size());  // of each rank: unit and tensor, from 1 on
  const Plan& plan = parts_.plan;
  for (const Op& op : list) {
    if (op.kind != OpKind::norm) continue;
    const std::uint64_t element = arithmetic(op.lane).first_non_finite(op);
    const bool is_first =
        found[2 * group.rank()] == 0 || static_cast<std::int64_t>(op.unit + 1) < found[2 * group.rank()];
    if (element == kernels::no_index || !is_first) continue;
    const auto at = tensors_in(plan.model().units[op.unit], plan.layout().units[op.unit],
                               plan.layout().units[op.unit].trained, group.rank(), {element, 1});
    found[2 * group.rank()] = static_cast<std::int64_t>(op.unit + 1);
    found[2 * group.rank() + 1] = at.empty() ? 0 : static_cast<std::int64_t>(at.front().tensor + 1);
  }
  parts_.mesh.reduce->all_reduce(found);
  std::pair<std::int64_t, std::int64_t> first{std::numeric_limits<std::int64_t>::max(), 0};
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    if (found[2 * rank] > 0) first = std::min(first, {found[2 * rank], found[2 * rank + 1]});
  }
  if (first.second == 0)
    return parts_.mesh.norm ? "other ranks' part of the model" : "no parameter that could be named";
  const Unit& unit = plan.model().units[static_cast<std::size_t>(first.first - 1)];
  return fmt::format("{} (unit {})", unit.tensors[static_cast<std::size_t>(first.second - 1)].name, unit.name);
}

}  // namespace ballast
