// The rest of an off-plan step. The uses to come are unknown, so nothing is done ahead, and gradients are not complete
// before the end of the step.
#include <ballast/error.h>

#include <fmt/format.h>

#include "zero/plan/compile.h"
#include "zero/plan/step_compiler.h"

namespace ballast {
namespace {

class OffPlanCompiler {
 public:
  OffPlanCompiler(const CompileInput& input, const OffPlanStep& step, const Trace& trace)
      : in_(input),
        step_(step),
        program_trace_(trace_of(input)),
        trace_(trace),
        program_(program_trace_, input.model.units.size()),
        uses_(trace_, input.model.units.size()),
        compiler_(input, program_, uses_, true) {
    compiler_.begin_step();
    take_over();
  }

  std::vector<Op> rest_of_visits();  // those of the trace beyond the step's
  std::vector<Op> rest_of_step();

 private:
  void take_over();
  bool was_updated(std::size_t position) const;
  void require_old(const Visit& visit) const;
  void add_rendezvous(Phase phase, std::size_t unit);

  const CompileInput& in_;
  const OffPlanStep& step_;
  const Trace program_trace_;
  const Trace trace_;
  Uses program_;
  Uses uses_;
  StepCompiler compiler_;
};

// Takes over from the uses that the trainer has made so far: where gradients are, and which units have been updated.
void OffPlanCompiler::take_over() {
  for (std::size_t i = 0; i < step_.visits.size(); ++i) {
    const std::size_t unit = step_.visits[i].unit;
    if (step_.visits[i].phase != Phase::backward || in_.layout.units[unit].trained.count() == 0) continue;
    compiler_.gradients().take_over(unit);
    if (was_updated(i)) compiler_.set_updated(unit);
  }
}

bool OffPlanCompiler::was_updated(std::size_t position) const {
  if (!in_.schedule.update_in_backward) return false;
  const std::size_t unit = step_.visits[position].unit;
  return position < step_.by_program ? program_.last_backward(unit) < step_.by_program
                                     : !compiler_.update_can_wait(unit);
}

std::vector<Op> OffPlanCompiler::rest_of_visits() {
  std::vector<std::size_t> updated;
  for (std::size_t i = step_.visits.size(); i < trace_.size(); ++i) {
    require_old(trace_[i]);
    if (trace_[i].phase == Phase::backward && compiler_.completes(0, i)) updated.push_back(trace_[i].unit);
  }
  compiler_.records().follow(tiles_on_drive(compiler_.context().slots, updated));
  add_rendezvous(trace_.back().phase, trace_.back().unit);
  for (std::size_t i = step_.visits.size(); i < trace_.size(); ++i) {
    compiler_.visit(in_.micro_steps - 1, i);
  }
  return compiler_.builder().step(0, 0);
}

// Computes the norm anew, because a unit may have got more gradients since the program added it to the norm.
std::vector<Op> OffPlanCompiler::rest_of_step() {
  std::vector<std::size_t> units = update_order(in_, uses_);
  std::erase_if(units, [&](std::size_t unit) { return compiler_.is_updated(unit); });
  compiler_.records().follow(tiles_on_drive(compiler_.context().slots, units));
  add_rendezvous(Phase::step, none);
  GradientSums& gradients = compiler_.gradients();
  if (!in_.schedule.update_in_backward) gradients.clear_norms();
  for (const std::size_t unit : units) {
    if (!gradients.summed(unit).exists()) continue;
    if (in_.placement.reduction == Reduction::boundary) gradients.sum(unit, gradients.summed(unit));
    gradients.norm(unit);
    if (in_.schedule.update_in_backward) compiler_.update(unit);
  }
  compiler_.end_step();
  return compiler_.builder().step(0, 0);
}

void OffPlanCompiler::require_old(const Visit& visit) const {
  require(!compiler_.is_updated(visit.unit), Code::out_of_order, [&] {
    return Problem{
        .what = fmt::format("cannot use the unit in {}: it has been updated in this backward pass", name(visit.phase)),
        .where = "unit " + in_.model.units[visit.unit].name,
        .needed = "one backward use of each unit in a step, its last use; or updates after the backward pass"};
  });
}

// No rank goes off plan alone: in each lane it waits here for the others, which find that it makes another call. After
// this, all ranks have committed the last step, so writes that follow no agreement wait for it.
void OffPlanCompiler::add_rendezvous(Phase phase, std::size_t unit) {
  const auto add = [&](Lane lane, Ranks ranks) {
    return compiler_.builder().add({.kind = OpKind::meet, .lane = lane, .phase = phase, .unit = unit, .ranks = ranks});
  };
  add(Lane::gather, Ranks::shard_group);
  compiler_.waits().set_agreed(add(Lane::reduce, Ranks::shard_group));
  if (in_.placement.groups() > 1) compiler_.waits().set_agreed(add(Lane::reduce, Ranks::replica_group));
}

}  // namespace

std::vector<Op> compile_visits(const CompileInput& input, const OffPlanStep& step, const Trace& chain) {
  Trace trace = step.visits;
  trace.insert(trace.end(), chain.begin(), chain.end());
  return OffPlanCompiler(input, step, trace).rest_of_visits();
}

std::vector<Op> compile_step(const CompileInput& input, const OffPlanStep& step) {
  return OffPlanCompiler(input, step, step.visits).rest_of_step();
}

}  // namespace ballast
