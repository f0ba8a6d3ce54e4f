// Gradients on their way to the update.
#pragma once

#include <algorithm>
#include <map>
#include <utility>

#include "zero/plan/builder.h"

namespace ballast {

// Emits the operations on gradients: these clear memory for them, sum them over the ranks and uses, and add their
// squares to the norm.
class GradientSums {
 public:
  explicit GradientSums(CompileContext& context) : context_(context) { begin_step(); }

  void begin_step() {
    uses_.clear();
    sums_done_.assign(context_.units(), 0);
    summed_.assign(context_.units(), {});
  }

  // Clears memory for the gradients of the use at `position`, and in backward of the next use that has gradients, so that no use
  // waits for it.
  // The lane of reductions also clears. So memory of the next use with gradients is cleared before this use's reduction, even if the
  // trainer uses parameters alone in between, as PyTorch does before each use with gradients. Within a chain, nothing beyond it is
  // cleared: the ring may have no more slots.
  void prepare(std::size_t position) {
    const Trace& trace = context_.trace();
    const std::size_t end_of_chain = std::min(context_.uses.end_of_chain(position), trace.size());
    for (std::size_t i = position; i < end_of_chain; ++i) {
      prepare_use(i);
    }
    if (end_of_chain > position + 1) return;
    std::size_t next = position + 1;
    if (trace[position].phase == Phase::backward) {
      while (next < trace.size() && !has_gradients(next)) {
        ++next;
      }
    }
    if (next < trace.size()) prepare_use(next);
  }

  Piece use_gradients(std::size_t position) const {  // where a backward use adds its gradients; nowhere if it has none
    const auto found = uses_.find(position);
    return found == uses_.end() ? Piece{} : found->second;
  }

  void add_use(std::size_t position, bool complete) {  // sums them after the use; complete: they are all of the step's
    const std::size_t unit = context_.trace()[position].unit;
    const Piece gradients = use_gradients(position);
    if (!is_boundary()) uses_.erase(position);  // the next micro-step gets other memory
    const bool is_normed = (!is_boundary() || complete) && sum(unit, gradients, complete);
    if (complete && !is_normed) norm(unit);
  }

  // Returns whether the sum is in the norm already; otherwise norm() adds it when it is complete.
  // Sums over the ranks, and adds the result to what the step has summed so far.
  bool sum(std::size_t unit, const Piece& gradients, bool complete = false) {
    StepSlots& slots = context_.slots;
    const bool on_device = context_.residence(unit).gradients == Tier::device;
    const std::size_t bytes = slots.shard_bytes(unit);
    const std::size_t kept = slots.of(unit).reduced;
    const Piece home = kept == none ? Piece{} : Piece{kept, 0, bytes};
    const std::size_t number = home.exists() ? sums_done_[unit]++ : 0;
    if (number > 0 && slots.adds_at_home(unit)) {
      accumulate(unit, gradients, home, context_.width(unit));
      summed_[unit] = home;
      return false;
    }
    const bool straight_home = home.exists() && number == 0;
    Piece sum = on_device && straight_home ? home : slots.rings.arriving.next(bytes);
    reduce(unit, number, gradients, sum);
    const bool is_first = straight_home || !home.exists();
    const bool is_normed = complete && is_first && slots.is_normed_on_its_way(unit);
    if (is_normed) add_norm(unit, sum, Tier::device);
    if (!on_device) {
      const Piece landed = straight_home ? home : slots.rings.landed.next(bytes);
      context_.builder.add({.kind = OpKind::download,
                            .lane = Lane::download,
                            .phase = Phase::backward,
                            .unit = unit,
                            .from = sum,
                            .to = landed});
      sum = landed;
    }
    if (home.exists() && sum != home) accumulate(unit, sum, home, 0);
    summed_[unit] = home.exists() ? home : sum;
    return is_normed;
  }

  void norm(std::size_t unit) { add_norm(unit, summed_[unit], context_.residence(unit).gradients); }
  void clear_norms() {
    for (const auto& [tier, lane] : {std::pair{Tier::device, Lane::reduce}, std::pair{Tier::host, Lane::host}}) {
      bool is_used = false;  // whether the program uses it
      for (std::size_t unit = 0; unit < context_.units(); ++unit) {
        is_used = is_used || (bytes_of(unit) > 0 && context_.slots.norm_tier(unit) == tier);
      }
      if (is_used) context_.builder.add({.kind = OpKind::clear, .lane = lane, .to = context_.slots.norm(tier)});
    }
  }

  const Piece& summed(std::size_t unit) const { return summed_[unit]; }
  void take_over(std::size_t unit) {  // a backward use of this step that other operations have summed
    if (is_boundary()) {
      summed_[unit] = {context_.slots.of(unit).gradients, 0, bytes_of(unit)};
    } else {
      ++sums_done_[unit];
      summed_[unit] = {context_.slots.of(unit).reduced, 0, context_.slots.shard_bytes(unit)};
    }
  }

 private:
  bool has_gradients(std::size_t position) const {
    const Visit& visit = context_.trace()[position];
    return visit.phase == Phase::backward && bytes_of(visit.unit) > 0;
  }

  void prepare_use(std::size_t position) {
    if (!has_gradients(position) || uses_.contains(position)) return;
    const std::size_t unit = context_.trace()[position].unit;
    Piece& gradients = uses_[position];
    if (is_boundary()) {
      gradients = {context_.slots.of(unit).gradients, 0, bytes_of(unit)};
      if (!summed_[unit].exists()) clear(unit, gradients);
      summed_[unit] = gradients;
    } else {
      gradients = context_.slots.rings.gradients.next(bytes_of(unit));
      clear(unit, gradients);
    }
  }

  // `value_bytes`: of gradients that are not reduced first; 0 for those that are.
  void accumulate(std::size_t unit, const Piece& from, const Piece& home, std::size_t value_bytes) {
    const bool on_device = context_.residence(unit).gradients == Tier::device;
    context_.builder.add({.kind = OpKind::accumulate,
                          .lane = on_device ? Lane::reduce : Lane::host,
                          .phase = Phase::backward,
                          .unit = unit,
                          .sum = sums_done_[unit] - 1,
                          .value_bytes = value_bytes,
                          .from = from,
                          .to = home});
  }

  void clear(std::size_t unit, const Piece& gradients) {
    context_.builder.add(
        {.kind = OpKind::clear, .lane = Lane::reduce, .phase = Phase::backward, .unit = unit, .to = gradients});
  }

  // `number`: how many sums of the unit came before in this step.
  void reduce(std::size_t unit, std::size_t number, const Piece& gradients, const Piece& to) {
    const Placement& placement = context_.input.placement;
    const std::vector<std::size_t> after = context_.input.schedule.update_in_backward
                                               ? std::exchange(context_.last_commit, {})
                                               : std::vector<std::size_t>{};
    const auto add = [&](Ranks ranks, const Piece& from, const Piece& sum) {
      context_.builder.add({.kind = OpKind::reduce,
                            .lane = Lane::reduce,
                            .phase = Phase::backward,
                            .unit = unit,
                            .ranks = ranks,
                            .sum = number,
                            .value_bytes = from == gradients ? context_.width(unit) : sizeof(float),
                            .from = from,
                            .to = sum,
                            .codes = context_.slots.reduce_codes(unit, ranks)},
                           after);
    };
    if (placement.ranks_per_group() == 1) return add(Ranks::replica_group, gradients, to);
    if (placement.groups() == 1) return add(Ranks::shard_group, gradients, to);
    const Piece partial = context_.slots.rings.partial.next(context_.slots.partial_bytes(unit));
    add(Ranks::shard_group, gradients, partial);
    add(Ranks::replica_group, partial, to);
  }

  void add_norm(std::size_t unit, const Piece& sum, Tier tier) {
    context_.builder.add({.kind = OpKind::norm,
                          .lane = tier == Tier::device ? Lane::reduce : Lane::host,
                          .phase = Phase::backward,
                          .unit = unit,
                          .from = sum,
                          .to = context_.slots.norm(tier)});
  }

  bool is_boundary() const { return context_.input.placement.reduction == Reduction::boundary; }
  std::size_t bytes_of(std::size_t unit) const { return context_.layout(unit).trained.count() * context_.width(unit); }

  CompileContext& context_;
  std::map<std::size_t, Piece> uses_;   // the key is the position: cleared for a backward use to come
  std::vector<std::size_t> sums_done_;  // one for each unit
  std::vector<Piece> summed_;           // one for each unit
};

}  // namespace ballast
