// Where the trainer leaves the program's order: the rest of the round is served on demand, list by list, and an order that
// comes again is compiled.
#include <fmt/format.h>

#include <algorithm>

#include "kernels/exact_sum_math.h"
#include "zero/engine/engine.h"

namespace ballast {

// Whether the list has these uses next.
bool Engine::is_next(const Trace& chain) const {
  auto visit = chain.begin();
  for (std::size_t i = next_; i < list().size() && visit != chain.end(); ++i) {
    const Op& op = list()[i];
    if (op.kind == OpKind::agree) return false;
    if (op.kind != OpKind::use) continue;
    if (op.unit != visit->unit || op.phase != visit->phase) return false;
    ++visit;
  }
  return visit == chain.end();
}

void Engine::serve(const Trace& chain) {
  leave_program(chain.back());
  if (sums_again(chain)) {
    change_program(input_.trace, true);
    follow({}, chain.back());  // the rest of the old program is gone
  }
  follow(compile_visits(input_, so_far_, chain), chain.back());
}

void Engine::serve_step() {
  leave_program({none, Phase::step});
  follow(compile_step(input_, so_far_), {none, Phase::step});
}

// Each list begins when everything before it is over: it may use any memory. So whatever is lent has to be given back.
void Engine::leave_program(const Visit& asked) {
  require(open_uses_.empty(), Code::out_of_order, [&] {
    const std::vector<Unit>& units = parts_.plan.model().units;
    const bool has_next = !departed_ && next_ < list().size() && list()[next_].kind == OpKind::use;
    const std::string lent = fmt::format("the end of the lease of unit {}", units[open_uses_.front().op->unit].name);
    return Problem{.what = fmt::format("the trainer asked for unit {} in {}, out of order, while another one is lent",
                                       units[asked.unit].name, name(asked.phase)),
                   .needed = has_next ? fmt::format("unit {} in {}, or {}", units[list()[next_].unit].name,
                                                    name(list()[next_].phase), lent)
                                      : lent};
  });
  finish();
  if (!departed_) so_far_.by_program = so_far_.visits.size();
}

void Engine::follow(std::vector<Op> ops, const Visit& asked) {
  departed_ = true;
  served_ = std::move(ops);
  Round& round = now();
  round.list = &served_;
  round.ops = std::vector<OpStatus>(served_.size());
  round.place = {static_cast<std::int64_t>(visited_.size()), static_cast<std::int64_t>(asked.unit + 1),
                 static_cast<std::int64_t>(asked.phase)};
  next_ = 0;
  issue_up_to_trainer();
}

// Whether gradients come again that the program's slots have room for only once.
bool Engine::sums_again(const Trace& chain) const {
  if (input_.sums_pass_by || updates_in_backward_ || input_.placement.reduction != Reduction::each) return false;
  return std::ranges::any_of(chain, [&](const Visit& visit) {
    return visit.phase == Phase::backward && std::ranges::any_of(so_far_.visits, [&](const Visit& before) {
             return before.unit == visit.unit && before.phase == Phase::backward;
           });
  });
}

// When the step that was served is done to its end, the memory becomes what every round of a program finds.
void Engine::return_to_program() {
  finish();
  ++on_demand_;
  departed_ = false;
  const Trace repeated = repeated_order();
  const bool changed = !repeated.empty() && change_program(repeated, input_.sums_pass_by);
  last_departed_ = visited_;
  begin_program();
  wait_exposed(Phase::step, Lane::gather, [&] { run_entry(changed); });
}

// The order of each micro-step of this round, if the last one departed and had the same; else empty.
Trace Engine::repeated_order() const {
  const Trace& visits = visited_;
  const std::size_t length = visits.size() / input_.micro_steps;
  if (visits != last_departed_ || visits.size() % input_.micro_steps != 0) return {};
  for (std::size_t i = length; i < visits.size(); ++i) {
    if (!(visits[i] == visits[i - length])) return {};
  }
  return {visits.begin(), visits.begin() + static_cast<std::ptrdiff_t>(length)};
}

// In the same slots, and for sums that pass by in some more. Not into a program in which gradients cannot wait for the step
// that can do so now: a round that departs from it again could not be served.
bool Engine::change_program(const Trace& trace, bool sums_pass_by) {
  CompileInput input = input_;
  input.trace = trace;
  input.sums_pass_by = sums_pass_by;
  const auto gathered = std::ranges::find(program().slots, "gathered", &Slot::name);
  if (gathered != program().slots.end()) input.schedule.gathered_bytes = gathered->bytes;
  auto changed = std::make_unique<const Program>(compile(input));
  const bool loses_sums = std::ranges::any_of(program().slots, [&](const Slot& slot) {
    return slot.name.starts_with("reduced.") && std::ranges::find(changed->slots, slot) == changed->slots.end();
  });
  if (loses_sums) return false;
  slots_.change_to(*changed);
  compiled_ = std::move(changed);
  input_.trace = trace;
  input_.sums_pass_by = sums_pass_by;
  input_.schedule = input.schedule;
  begin_program();
  return true;
}

std::string Engine::text(const Place& place) const {
  if (place[1] == 0) return "a step";
  return fmt::format("unit {} in {}", parts_.plan.model().units[static_cast<std::size_t>(place[1] - 1)].name,
                     name(static_cast<Phase>(place[2])));
}

// Ranks that use units in different orders would mix up what belongs to different units: no rank goes on then. One that
// leaves the order alone meets those that do not in calls of another kind, which communicators refuse.
void Engine::meet(const Op& op, const Round& round) const {
  constexpr std::size_t words = std::tuple_size_v<Place>;
  static_assert(kernels::exact_sum_words % words != 0, "a meeting must not be taken for an agreement");
  Communicator& shards = op.lane == Lane::gather ? *parts_.mesh.gather : *parts_.mesh.reduce;
  Communicator& group = op.ranks == Ranks::shard_group ? shards : *parts_.mesh.replicas;
  std::vector<std::int64_t> places(words * group.size());
  std::ranges::copy(round.place, places.begin() + static_cast<std::ptrdiff_t>(words * group.rank()));
  try {
    group.all_reduce(places);
  } catch (const Error& error) {
    if (error.code() != Code::wrong_size) throw;
    Problem problem = error.problem();
    problem.what =
        fmt::format("this rank left the order of its program alone, for {}: {}", text(round.place), problem.what);
    fail(Code::out_of_order, problem);
  }
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    Place theirs{};
    std::copy_n(places.begin() + static_cast<std::ptrdiff_t>(words * rank), words, theirs.begin());
    require(theirs == round.place, Code::out_of_order, [&] {
      return Problem{
          .what = fmt::format("the trainer's ranks leave the order in different ways: after {} uses this one "
                              "asked for {}",
                              round.place[0], text(round.place)),
          .needed = "the same uses in the same order on all ranks",
          .available = fmt::format("{} after {} uses on rank {} of the group", text(theirs), theirs[0], rank)};
    });
  }
}

}  // namespace ballast
