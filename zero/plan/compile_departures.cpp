// The rest of a round that has left the program's order. Nothing is known of what comes next, so nothing is done ahead, and
// gradients are not complete before the step.
#include <fmt/format.h>

#include "kernels/runtime/error.h"
#include "zero/plan/compiler.h"

namespace ballast {

std::vector<Op> Compiler::rest_of_visits(const DepartedRound& round) && {
  take_over(round);
  std::vector<std::size_t> updated;
  for (std::size_t i = round.visits.size(); i < trace_.size(); ++i) {
    require_old(trace_[i]);
    if (trace_[i].phase == Phase::backward && is_complete(0, i)) updated.push_back(trace_[i].unit);
  }
  on_drive_ = tiles_on_drive(updated);
  meet(trace_.back().phase, trace_.back().unit);
  for (std::size_t i = round.visits.size(); i < trace_.size(); ++i) {
    visit(in_.micro_steps - 1, i);
  }
  return builder_.round(0, 0);
}

// What the program has put into the norm so far is made anew: more gradients may have come since.
std::vector<Op> Compiler::rest_of_step(const DepartedRound& round) && {
  take_over(round);
  std::vector<std::size_t> units = order_of_updates(uses_);
  std::erase_if(units, [&](std::size_t unit) { return current_[unit]; });
  on_drive_ = tiles_on_drive(units);
  meet(Phase::step, none);
  if (!in_.schedule.update_in_backward) clear_norms();
  for (const std::size_t unit : units) {
    if (!summed_[unit].exists()) continue;
    if (in_.placement.reduction == Reduction::boundary) sum(unit, summed_[unit]);
    norm(unit);
    if (in_.schedule.update_in_backward) update(unit);
  }
  step();
  return builder_.round(0, 0);
}

// From what the trainer has done so far: where gradients are, and which units have been updated.
void Compiler::take_over(const DepartedRound& round) {
  begin_round();
  departed_ = true;
  const bool each = in_.placement.reduction == Reduction::each;
  const Uses program(of_program_, in_.model.units.size());
  for (std::size_t i = 0; i < round.visits.size(); ++i) {
    const std::size_t unit = round.visits[i].unit;
    const std::size_t trained = in_.layout.units[unit].trained.count();
    if (round.visits[i].phase != Phase::backward || trained == 0) continue;
    if (each) ++sums_done_[unit];
    summed_[unit] = each ? Piece{slots_.of(unit).reduced, 0, slots_.shard_bytes(unit)}
                         : Piece{slots_.of(unit).gradients, 0, trained * width(unit)};
    const bool by_program = i < round.by_program;
    const bool updated = by_program ? program.last_backward(unit) < round.by_program : !can_wait(unit);
    if (in_.schedule.update_in_backward && updated) current_[unit] = true;
  }
}

// Whether an update in the backward pass can be left to the step: where the gradients stay in memory until then.
bool Compiler::can_wait(std::size_t unit) const {
  return in_.placement.reduction == Reduction::boundary || slots_.of(unit).reduced != none;
}

void Compiler::require_old(const Visit& visit) const {
  require(!current_[visit.unit], Code::out_of_order, [&] {
    return Problem{
        .what = fmt::format("the trainer asked for a unit in {} that has been updated in this backward pass",
                            name(visit.phase)),
        .where = "unit " + in_.model.units[visit.unit].name,
        .needed = "one backward use of each unit in a step, its last use; or updates after the backward pass"};
  });
}

// No rank leaves the order alone: in each lane it waits here for the others, who find that it makes another call. All have
// committed the last round then, which whatever overwrites records without an agreement has to wait for.
void Compiler::meet(Phase phase, std::size_t unit) {
  const auto add = [&](Lane lane, Ranks ranks) {
    return builder_.add({.kind = OpKind::meet, .lane = lane, .phase = phase, .unit = unit, .ranks = ranks});
  };
  add(Lane::gather, Ranks::shard_group);
  agreed_ = add(Lane::reduce, Ranks::shard_group);
  if (in_.placement.replicas > 1) agreed_ = add(Lane::reduce, Ranks::replica_group);
}

void Compiler::clear_norms() {
  for (const auto& [tier, lane] : {std::pair{Tier::device, Lane::reduce}, std::pair{Tier::host, Lane::host}}) {
    if (slots_.norm(tier).exists()) builder_.add({.kind = OpKind::clear, .lane = lane, .to = slots_.norm(tier)});
  }
}

std::vector<Op> compile_visits(const CompileInput& input, const DepartedRound& round, const Trace& chain) {
  const Trace of_program = trace_of(input);
  Trace trace = round.visits;
  trace.insert(trace.end(), chain.begin(), chain.end());
  return Compiler(input, of_program, trace).rest_of_visits(round);
}

std::vector<Op> compile_step(const CompileInput& input, const DepartedRound& round) {
  const Trace of_program = trace_of(input);
  return Compiler(input, of_program, round.visits).rest_of_step(round);
}

}  // namespace ballast
