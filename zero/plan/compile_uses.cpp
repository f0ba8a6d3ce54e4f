// Forward and backward: parameters come before they are used, gradients are summed after that.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/runtime/error.h"
#include "kernels/runtime/sizes.h"
#include "zero/plan/compiler.h"

namespace ballast {

void Compiler::visit(std::size_t micro_step, std::size_t position) {
  const Visit& visit = trace_[position];
  const bool backward = visit.phase == Phase::backward;
  if (position == 0 || !trace_[position - 1].held) bring_chain(position);
  prefetch(micro_step, position);
  prepare_gradients(position);
  const Piece gradients = backward ? gradients_[position] : Piece{};
  builder_.add({.kind = OpKind::use,
                .lane = Lane::compute,
                .phase = visit.phase,
                .unit = visit.unit,
                .from = whole_parameters(visit.unit),
                .to = gradients});
  if (backward && gradients.exists()) after_backward(micro_step, position, gradients);
}

// What is held together has to be there together, even if everything else must go.
void Compiler::bring_chain(std::size_t position) {
  const std::size_t end = uses_.end_of_chain(position);
  const auto bring_all = [&] {
    for (std::size_t i = position; i < end; ++i) {
      if (!bring(trace_[i].unit, position, i)) return false;
    }
    return true;
  };
  if (bring_all()) return;
  gathered_.clear();
  require(bring_all(), Code::memory_budget, [&] {
    std::size_t bytes = 0;
    for (std::size_t i = position; i < end; ++i) {
      if (slots_.comes_and_goes(trace_[i].unit)) bytes += slots_.whole_bytes(trace_[i].unit);
    }
    return Problem{.what = "the memory for gathered parameters is too small",
                   .where = fmt::format("unit {}", in_.model.units[trace_[end - 1].unit].name),
                   .needed = human_bytes(bytes),
                   .available = human_bytes(slots_.gathered_bytes()),
                   .remedy = "Give gathered_bytes more, or cut the model into smaller units."};
  });
}

// Also into the next micro-step, but not into the next step: parameters will be others then.
void Compiler::prefetch(std::size_t micro_step, std::size_t position) {
  const std::size_t end = micro_step + 1 < in_.micro_steps ? 2 * trace_.size() : trace_.size();
  for (std::size_t i = position + 1; i < std::min(position + 1 + in_.schedule.prefetch, end); ++i) {
    if (!bring(trace_[i % trace_.size()].unit, position, i)) return;
  }
}

// Memory is cleared one use ahead, so that no use waits for it.
void Compiler::prepare_gradients(std::size_t position) {
  const std::size_t until = std::min(std::max(position + 2, uses_.end_of_chain(position)), trace_.size());
  for (std::size_t i = position; i < until; ++i) {
    const std::size_t unit = trace_[i].unit;
    const std::size_t bytes = in_.layout.units[unit].trained.count() * width(unit);
    if (trace_[i].phase != Phase::backward || bytes == 0 || gradients_.contains(i)) continue;
    if (in_.placement.reduction == Reduction::boundary) {
      gradients_[i] = {slots_.of(unit).gradients, 0, bytes};
      if (!summed_[unit].exists()) clear(unit, gradients_[i]);
      summed_[unit] = gradients_[i];
    } else {
      gradients_[i] = slots_.gradients.next(bytes);
      clear(unit, gradients_[i]);
    }
  }
}

void Compiler::clear(std::size_t unit, const Piece& gradients) {
  builder_.add({.kind = OpKind::clear, .lane = Lane::reduce, .phase = Phase::backward, .unit = unit, .to = gradients});
}

// Whether a unit's gradients are the step's after this use. Where nothing is known of what comes, they are so only if they
// have to be: where an update is due that cannot wait for the step.
bool Compiler::is_complete(std::size_t micro_step, std::size_t position) const {
  if (departed_) return in_.schedule.update_in_backward && !can_wait(trace_[position].unit);
  return micro_step + 1 == in_.micro_steps && uses_.is_last_backward(position);
}

void Compiler::after_backward(std::size_t micro_step, std::size_t position, const Piece& gradients) {
  const std::size_t unit = trace_[position].unit;
  const bool last = is_complete(micro_step, position);
  if (in_.placement.reduction == Reduction::each) {
    gradients_.erase(position);  // the next micro-step's will be others
    sum(unit, gradients);
  } else if (last) {
    sum(unit, gradients);
  }
  if (!last) return;
  norm(unit);
  if (in_.schedule.update_in_backward) update(unit);
}

// Over the ranks, and onto what the step has summed so far.
void Compiler::sum(std::size_t unit, const Piece& gradients) {
  const bool on_device = slots_.residence(unit).gradients == Tier::device;
  const std::size_t bytes = slots_.shard_bytes(unit);
  const std::size_t kept = slots_.of(unit).reduced;
  const Piece home = kept == none ? Piece{} : Piece{kept, 0, bytes};
  const bool straight_home = home.exists() && sums_done_[unit]++ == 0;
  Piece sum = on_device && straight_home ? home : slots_.arriving.next(bytes);
  reduce(unit, gradients, sum);
  if (!on_device) {
    const Piece landed = straight_home ? home : slots_.landed.next(bytes);
    builder_.add({.kind = OpKind::download,
                  .lane = Lane::download,
                  .phase = Phase::backward,
                  .unit = unit,
                  .from = sum,
                  .to = landed});
    sum = landed;
  }
  if (home.exists() && sum != home) {
    builder_.add({.kind = OpKind::accumulate,
                  .lane = on_device ? Lane::reduce : Lane::host,
                  .phase = Phase::backward,
                  .unit = unit,
                  .from = sum,
                  .to = home});
  }
  summed_[unit] = home.exists() ? home : sum;
}

void Compiler::reduce(std::size_t unit, const Piece& gradients, const Piece& to) {
  const std::vector<std::size_t> after =
      in_.schedule.update_in_backward ? waits_for_last_commit() : std::vector<std::size_t>{};
  const auto add = [&](Ranks ranks, const Piece& from, const Piece& sum) {
    builder_.add({.kind = OpKind::reduce,
                  .lane = Lane::reduce,
                  .phase = Phase::backward,
                  .unit = unit,
                  .ranks = ranks,
                  .from = from,
                  .to = sum},
                 after);
  };
  if (in_.placement.shards == 1) return add(Ranks::replica_group, gradients, to);
  if (in_.placement.replicas == 1) return add(Ranks::shard_group, gradients, to);
  const Piece partial = slots_.partial.next(to.bytes);
  add(Ranks::shard_group, gradients, partial);
  add(Ranks::replica_group, partial, to);
}

// Before a rank overwrites the generation before the last, all ranks have committed the last one: otherwise they might
// have no step in common. The first operation that all of them meet in, ahead of all writes, sees to that.
std::vector<std::size_t> Compiler::waits_for_last_commit() {
  const std::size_t commit = std::exchange(committed_, none);
  return commit == none ? std::vector<std::size_t>{} : std::vector<std::size_t>{commit};
}

void Compiler::norm(std::size_t unit) {
  const bool on_device = slots_.residence(unit).gradients == Tier::device;
  builder_.add({.kind = OpKind::norm,
                .lane = on_device ? Lane::reduce : Lane::host,
                .phase = Phase::backward,
                .unit = unit,
                .from = summed_[unit],
                .to = slots_.norm(on_device ? Tier::device : Tier::host)});
}

}  // namespace ballast
