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
    placed_at_end_ = true;
    sums_done_.assign(context_.units(), 0);
    summed_.assign(context_.units(), {});
  }

  // Clears memory for the gradients of the use at `position`, and in backward of the next use that has gradients, so that no use
  // waits for it.
  // The lane of reductions also clears. So memory of the next use with gradients is cleared before this use's reduction, even if the
  // trainer uses parameters alone in between, as PyTorch does before each use with gradients. Within a chain, nothing beyond it is
  // cleared: there may be no memory for it.
  void prepare(std::size_t position) {
    const Trace& trace = context_.trace();
    const std::size_t end_of_chain = std::min(context_.uses.end_of_chain(position), trace.size());
    for (std::size_t i = position; i < end_of_chain; ++i) {
      prepare_use(i, false);
    }
    if (end_of_chain > position + 1) return;
    std::size_t next = position + 1;
    if (trace[position].phase == Phase::backward) {
      while (next < trace.size() && !has_gradients(next)) {
        ++next;
      }
    }
    if (next < trace.size()) prepare_use(next, true);
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

  // Sums over the ranks, and adds the result to what the step has summed so far. Returns whether a complete sum is in the norm
  // already; otherwise norm() adds it.
  bool sum(std::size_t unit, const Piece& gradients, bool complete = false) {
    StepSlots& slots = context_.slots;
    const std::size_t kept = slots.of(unit).reduced;
    const Piece home = kept == none ? Piece{} : Piece{kept, 0, slots.shard_bytes(unit)};
    const std::size_t number = home.exists() ? sums_done_[unit]++ : 0;
    Sum way{unit, number, gradients, home, norm_of_sum(unit, complete, number == 0)};
    const bool is_added =
        number > 0 && way.norm.exists();  // the last operation adds to the home, and makes the squares
    if (number > 0 && slots.adds_at_home(unit)) {
      accumulate(way, gradients, home, {.value_bytes = context_.width(unit)});
      summed_[unit] = home;
      return is_added;
    }
    if (slots.sums_on_host(unit)) {
      summed_[unit] = sum_on_host(way);
      return is_added;
    }
    Piece last;
    for (const Range& part : slots.parts_of_sum(unit))
      last = sum_part(way, part);
    summed_[unit] = home.exists() ? home : last;
    return way.norm.exists();
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
      take_sum(unit);
    }
  }
  void take_sum(std::size_t unit) {  // the whole sum of this step, which other operations have made
    summed_[unit] = {context_.slots.of(unit).reduced, 0, context_.slots.shard_bytes(unit)};
  }

 private:
  // A sum over the ranks: of which gradients, how many of the unit came before in the step, where sums of the step are added up if
  // anywhere, and the norm that gets its squares while it is made or on its way there, if any does.
  struct Sum {
    std::size_t unit = 0;
    std::size_t number = 0;
    Piece gradients{};
    Piece home{};
    Piece norm{};
  };

  // Returns the norm to which the operations of a complete sum add its squares. None if the squares need an operation of their own:
  // another rank counts a tensor of the unit, or the ranks have exchanged the sum and it is kept.
  Piece norm_of_sum(std::size_t unit, bool complete, bool is_first) const {
    const StepSlots& slots = context_.slots;
    if (!complete) return {};
    if (is_first && slots.is_normed_on_its_way(unit)) return slots.norm(Tier::device);
    const Tier tier = context_.residence(unit).gradients;
    const bool is_made_here = !is_first || (context_.input.placement.ranks() == 1 && tier == Tier::device);
    return is_made_here && counts_all(unit) ? slots.norm(tier) : Piece{};
  }

  bool counts_all(std::size_t unit) const {
    return std::ranges::all_of(context_.input.model.units[unit].tensors, &Tensor::counted);
  }

  // Returns the memory in which the sum of a part of the shard lies then.
  Piece sum_part(const Sum& of, const Range& part) {
    StepSlots& slots = context_.slots;
    const bool is_whole = part.count == context_.layout(of.unit).trained.shard;
    const auto part_of = [&](const Piece& piece, std::size_t width) {
      return is_whole || !piece.exists() ? piece : piece.part(part.first * width, part.count * width);
    };
    const std::size_t bytes = part.count * context_.width_of_sums(of.unit);
    const Piece gradients = part_of(of.gradients, context_.width(of.unit));
    const Piece home = part_of(of.home, context_.width_of_sums(of.unit));
    const bool on_device = context_.residence(of.unit).gradients == Tier::device;
    const bool straight_home = home.exists() && of.number == 0;
    Piece sum = gradients;
    if (!slots.sums_in_place(of.unit)) sum = on_device && straight_home ? home : slots.rings.arriving.next(bytes);
    const bool is_reduced_last = of.norm.exists() && of.number == 0;
    const bool takes_norm = is_reduced_last && context_.input.placement.ranks() == 1 && counts_all(of.unit);
    reduce(of, part.first, gradients, sum, takes_norm ? of.norm : Piece{});
    if (is_reduced_last && !takes_norm) add_norm(of.unit, sum, Tier::device, part.first);
    if (!on_device) {
      const Piece landed = straight_home ? home : slots.rings.landed.next(bytes);
      context_.copy(OpKind::download, Phase::backward, {of.unit}, sum, landed);
      sum = landed;
    }
    if (home.exists() && sum != home) accumulate(of, sum, home, {.first = part.first});
    return sum;
  }

  // Copies a unit's gradients to the host, where the ranks sum them.
  Piece sum_on_host(const Sum& of) {
    StepRings& rings = context_.slots.rings;
    const Piece copy = rings.unsummed.next(of.gradients.bytes);
    context_.copy(OpKind::download, Phase::backward, {of.unit}, of.gradients, copy);
    const bool straight_home = of.home.exists() && of.number == 0;
    const Piece sum = straight_home ? of.home : rings.landed.next(context_.slots.shard_bytes(of.unit));
    reduce(of, 0, copy, sum);
    if (!of.home.exists() || straight_home) return sum;
    accumulate(of, sum, of.home, {});
    return of.home;
  }

  bool has_gradients(std::size_t position) const {
    const Visit& visit = context_.trace()[position];
    return visit.phase == Phase::backward && bytes_of(visit.unit) > 0;
  }

  void prepare_use(std::size_t position, bool is_ahead) {
    if (!has_gradients(position) || uses_.contains(position)) return;
    const std::size_t unit = context_.trace()[position].unit;
    if (is_boundary()) {
      const Piece gradients{context_.slots.of(unit).gradients, 0, bytes_of(unit)};
      uses_[position] = gradients;
      if (!summed_[unit].exists()) clear(unit, gradients);
      summed_[unit] = gradients;
    } else if (const Piece gradients = room_for(bytes_of(unit), is_ahead); gradients.exists()) {
      uses_[position] = gradients;
      clear(unit, gradients);
    }
  }

  // Finds memory apart from that of the uses to come: at one end of all, and next time at the other; units that are held together
  // also lie next to each other. Ahead of its turn a use may find none, and is cleared later.
  Piece room_for(std::size_t bytes, bool is_ahead) {
    const Piece& all = context_.slots.gradients();
    const std::size_t rounded = round_up(bytes, gathered_alignment);
    std::vector<std::size_t> begins{0, all.bytes - rounded};
    if (!placed_at_end_) std::ranges::reverse(begins);
    for (const auto& [position, other] : uses_) {
      if (is_ahead) break;
      begins.push_back(round_up(other.end(), gathered_alignment));
      begins.push_back(other.begin - std::min(other.begin, rounded));
    }
    for (const std::size_t begin : begins) {
      const Piece piece = all.part(begin, rounded);
      const bool is_apart = std::ranges::none_of(uses_, [&](const auto& use) { return overlap(use.second, piece); });
      if (!is_apart || piece.end() > all.bytes) continue;
      placed_at_end_ = begin > 0;
      return piece.part(0, bytes);
    }
    require(is_ahead, Code::internal, [] { return Problem{.what = "cannot find memory for the gradients of a use"}; });
    return {};
  }

  struct Addend {
    std::size_t first = 0;        // element of the shard
    std::size_t value_bytes = 0;  // of gradients that are not reduced first; 0 for those that are
  };

  void accumulate(const Sum& sum, const Piece& from, const Piece& home, const Addend& of) {
    const bool on_device = context_.residence(sum.unit).gradients == Tier::device;
    context_.builder.add({.kind = OpKind::accumulate,
                          .lane = on_device ? Lane::reduce : Lane::host,
                          .phase = Phase::backward,
                          .unit = sum.unit,
                          .first = of.first,
                          .sum = sum.number,
                          .value_bytes = of.value_bytes,
                          .from = from,
                          .to = home,
                          .state = sum.norm});
  }

  void clear(std::size_t unit, const Piece& gradients) {
    context_.builder.add(
        {.kind = OpKind::clear, .lane = Lane::reduce, .phase = Phase::backward, .unit = unit, .to = gradients});
  }

  void reduce(const Sum& of, std::size_t first, const Piece& gradients, const Piece& to, const Piece& norm = {}) {
    const std::size_t unit = of.unit;
    const Placement& placement = context_.input.placement;
    const bool writes_follow = context_.input.schedule.update_in_backward || context_.input.updates_early();
    const std::vector<std::size_t> after =
        writes_follow ? std::exchange(context_.last_commit, {}) : std::vector<std::size_t>{};
    const auto add = [&](Ranks ranks, const Piece& from, const Piece& sum) {
      context_.builder.add({.kind = OpKind::reduce,
                            .lane = context_.slots.sums_on_host(unit) ? Lane::host : Lane::reduce,
                            .phase = Phase::backward,
                            .unit = unit,
                            .ranks = ranks,
                            .parts = context_.layout(unit).trained.parts,
                            .first = first,
                            .sum = of.number,
                            .value_bytes = from == gradients ? context_.width(unit) : sizeof(float),
                            .from = from,
                            .to = sum,
                            .state = norm,
                            .codes = context_.slots.reduce_codes(unit, ranks)},
                           after);
    };
    if (placement.ranks_per_group() == 1) return add(Ranks::replica_group, gradients, to);
    if (placement.groups() == 1) return add(Ranks::shard_group, gradients, to);
    const Piece partial = context_.slots.rings.partial.next(context_.slots.partial_bytes(unit));
    add(Ranks::shard_group, gradients, partial);
    add(Ranks::replica_group, partial, to);
  }

  void add_norm(std::size_t unit, const Piece& sum, Tier tier, std::size_t first = 0) {
    context_.builder.add({.kind = OpKind::norm,
                          .lane = tier == Tier::device ? Lane::reduce : Lane::host,
                          .phase = Phase::backward,
                          .unit = unit,
                          .first = first,
                          .from = sum,
                          .to = context_.slots.norm(tier)});
  }

  bool is_boundary() const { return context_.input.placement.reduction == Reduction::boundary; }
  std::size_t bytes_of(std::size_t unit) const { return context_.layout(unit).trained.count() * context_.width(unit); }

  CompileContext& context_;
  std::map<std::size_t, Piece> uses_;   // the key is the position: cleared for a backward use to come
  bool placed_at_end_ = true;           // the last use of those
  std::vector<std::size_t> sums_done_;  // one for each unit
  std::vector<Piece> summed_;           // one for each unit
};

}  // namespace ballast
