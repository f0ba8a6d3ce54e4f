#include "zero/plan/compile.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "optim/step.h"
#include "zero/plan/gradient_sums.h"
#include "zero/plan/parameter_gathers.h"
#include "zero/plan/record_stream.h"
#include "zero/plan/unit_updates.h"

namespace ballast {
namespace {

// Returns the units in the order of the next forward. Where only backward is known, it is taken for that order in reverse.
std::vector<std::size_t> forward_order(const CompileInput& input, const Uses& uses) {
  std::vector<std::size_t> units = uses.by_first_visit();
  if (!input.schedule.overlap_gathers || uses.has_forward()) return units;
  const auto visited = std::ranges::find_if(units, [&](std::size_t unit) { return uses.backward_visits(unit) == 0; });
  std::ranges::reverse(units.begin(), visited);
  return units;
}

// Says of each unit whether its update follows its last use: of all with update_in_backward, and otherwise of those that can be
// updated again, because their whole state is in the records of a run, and that have no use after it.
std::vector<bool> updated_in_backward(const CompileInput& input, const Uses& uses, const StepSlots& slots) {
  std::vector<bool> in_backward(input.model.units.size(), input.schedule.update_in_backward);
  for (std::size_t unit = 0; unit < in_backward.size() && input.updates_early(); ++unit) {
    const std::vector<Tier>& state = slots.residence(unit).state;
    const bool in_records = std::ranges::count(state, Tier::nvme) == std::ssize(state) && !state.empty();
    in_backward[unit] = in_records && uses.ends_in_backward(unit);
  }
  return in_backward;
}

// Returns the units in the order in which the gradients of those that are updated in backward become complete, and then the others
// in the order of the next forward.
std::vector<std::size_t> update_order(const CompileInput& input, const Uses& uses,
                                      const std::vector<bool>& in_backward) {
  std::vector<std::size_t> units = forward_order(input, uses);
  std::ranges::stable_sort(units, {},
                           [&](std::size_t unit) { return in_backward[unit] ? uses.last_backward(unit) : none; });
  return units;
}

// Emits the operations of one step, use by use, in the slots of a program.
class StepCompiler {
 public:
  // Operations follow `uses`; the slots are those of the program that follows `program_uses`. off_plan: the uses to come
  // are unknown.
  StepCompiler(const CompileInput& input, const Uses& program_uses, const Uses& uses, bool off_plan = false)
      : context_(input, program_uses, uses, off_plan),
        in_backward_(updated_in_backward(input, program_uses, context_.slots)),
        records_(context_, update_order(input, program_uses, in_backward_)),
        parameters_(context_, records_),
        gradients_(context_),
        updates_(context_, parameters_, gradients_, records_) {}

  CompileContext& context() { return context_; }
  GradientSums& gradients() { return gradients_; }
  RecordStream& records() { return records_; }
  ParameterGathers& parameters() { return parameters_; }
  UnitUpdates& updates() { return updates_; }

  bool is_early(std::size_t unit) const { return in_backward_[unit] && !context_.input.schedule.update_in_backward; }
  bool is_updated(std::size_t unit) const { return updated_[unit]; }
  void set_updated(std::size_t unit) { updated_[unit] = true; }

  // Prepares what every step expects: gathers the first units, reads kept records.
  void enter() {
    context_.slots.restart_rings();
    updated_.assign(context_.units(), true);
    for (std::size_t unit = 0; unit < context_.units(); ++unit) {
      gather_kept(unit);
      parameters_.gather_kept_frozen(unit);
    }
    records_.read_kept();
    hoist();
  }

  void begin_step() {
    context_.slots.restart_rings();
    gradients_.begin_step();
    context_.agreement.clear();
    records_.begin_step();
    updated_.assign(context_.units(), false);
    hoisted_ = 0;
  }

  void visit(std::size_t micro_step, std::size_t position) {
    const Trace& trace = context_.trace();
    const Visit& visit = trace[position];
    if (position == 0 || !trace[position - 1].held) parameters_.ensure_chain_gathered(position);
    parameters_.prefetch(micro_step, position);
    gradients_.prepare(position);
    const Piece gradients = visit.phase == Phase::backward ? gradients_.use_gradients(position) : Piece{};
    context_.builder.add({.kind = OpKind::use,
                          .lane = Lane::compute,
                          .phase = visit.phase,
                          .unit = visit.unit,
                          .from = parameters_.full(visit.unit),
                          .to = gradients,
                          .exact = visit.exact});
    if (!gradients.exists()) return;
    const bool complete = completes(micro_step, position);
    gradients_.add_use(position, complete);
    if (complete && in_backward_[visit.unit]) update(visit.unit);
  }

  void update(std::size_t unit) {
    begin_update(unit);
    end_updates(0);
  }

  // Adds one decision of all ranks, updates in the order of the next forward, and its first gathers.
  void end_step() {
    parameters_.drop_all();  // gathered parameters are old when the updates are done
    const std::size_t agreement = context_.builder.add({.kind = OpKind::agree,
                                                        .lane = Lane::reduce,
                                                        .to = context_.slots.norm(Tier::device),
                                                        .state = context_.slots.norm(Tier::host)},
                                                       std::exchange(context_.last_commit, {}));
    if (!context_.input.schedule.update_in_backward) context_.agreement = {agreement};
    update_rest();
    commit({agreement});
  }

  // Updates the units that have not been updated yet.
  void update_rest() {
    for (const std::size_t unit : forward_order(context_.input, context_.uses)) {
      if (!updated_[unit]) {
        if (context_.uses.backward_visits(unit) > 0) {
          begin_update(unit);
          end_updates(context_.slots.updates_at_once() - 1);
        } else {
          leave(unit);
        }
      }
      hoist();
    }
    if (!begun_.empty()) {
      end_updates(0);
      hoist();
    }
  }

  void commit(const std::vector<std::size_t>& after) {
    if (records_.any())
      context_.last_commit = {context_.builder.add({.kind = OpKind::commit, .lane = Lane::disk}, after)};
  }

  // Whether an update in the backward pass can be left to the end of the step: the gradients stay in memory until then.
  bool update_can_wait(std::size_t unit) const {
    return context_.input.placement.reduction == Reduction::boundary || context_.slots.of(unit).reduced != none;
  }

  // Whether a unit's gradients are complete after its use at `position`. Off plan they are only where they have to be: where an
  // update is due that cannot wait for the end.
  bool completes(std::size_t micro_step, std::size_t position) const {
    const CompileInput& in = context_.input;
    if (context_.off_plan)
      return in.schedule.update_in_backward && !update_can_wait(context_.uses.trace()[position].unit);
    return micro_step + 1 == in.micro_steps && context_.uses.is_last_backward(position);
  }

 private:
  void begin_update(std::size_t unit) {
    parameters_.drop(unit);
    updates_.begin(unit);
    begun_.push_back(unit);
  }

  // Ends all that have begun, but for the last ones.
  void end_updates(std::size_t but) {
    for (; begun_.size() > but; begun_.pop_front()) {
      const std::size_t unit = begun_.front();
      updates_.end(unit);
      updated_[unit] = true;
      gather_kept(unit);
    }
  }

  // Leaves a unit without gradients as it is. Its records come after those of the units before it.
  void leave(std::size_t unit) {
    end_updates(0);
    updates_.carry_over(unit);
    updated_[unit] = true;
    gather_kept(unit);
  }

  // The entry does this after an off-plan step.
  void gather_kept(std::size_t unit) {
    if (!context_.off_plan) parameters_.gather_kept(unit);
  }

  // The next step's first gathers, of units whose parameters are that step's already: as far ahead as `prefetch` says, and further
  // while no other unit has to go. So with memory for all units (keep_gathered) no link is idle until the next forward. After an
  // off-plan step the entry does this.
  void hoist() {
    if (context_.off_plan) return;
    const Trace& trace = context_.trace();
    const std::size_t near = context_.uses.end_of_units(0, context_.input.schedule.prefetch, trace.size());
    for (; hoisted_ < trace.size(); ++hoisted_) {
      const std::size_t unit = trace[hoisted_].unit;
      if (!updated_[unit] || !(hoisted_ < near || parameters_.has_spare_memory(unit))) return;
      if (!parameters_.ensure_gathered(unit, 0, hoisted_)) return;
    }
  }

  CompileContext context_;
  std::vector<bool> in_backward_;  // one for each unit: whether its update follows its last use
  RecordStream records_;
  ParameterGathers parameters_;
  GradientSums gradients_;
  UnitUpdates updates_;
  std::deque<std::size_t> begun_;  // units whose updates have begun, and not ended
  std::vector<bool> updated_;      // whether a unit's parameters are the next step's
  std::size_t hoisted_ = 0;        // visits of the next step
};

Program without_operations(const StepSlots& slots) {
  return {.slots = slots.all(), .homes = slots.homes(), .entry = {}, .ops = {}};
}

void add_step(StepCompiler& compiler) {
  compiler.begin_step();
  for (std::size_t micro_step = 0; micro_step < compiler.context().input.micro_steps; ++micro_step) {
    for (std::size_t position = 0; position < compiler.context().trace().size(); ++position) {
      compiler.visit(micro_step, position);
    }
  }
  compiler.end_step();
}

// Marks the ends of the operations that change parameters on the device after the agreement.
void mark_updates(Program& program) {
  for (Op& op : program.ops) {
    const bool is_on_device = op.to.exists() && program.slots[op.to.slot].tier == Tier::device;
    const bool has_parameters = is_on_device && program.slots[op.to.slot].role == SlotRole::parameters;
    op.is_marked = has_parameters && op.phase == Phase::step;
  }
}

// Emits the rest of an off-plan step. The uses to come are unknown, so nothing is done ahead, and gradients are not complete
// before the end of the step.
class OffPlanCompiler {
 public:
  OffPlanCompiler(const CompileInput& input, const OffPlanStep& step, const Trace& trace)
      : in_(input),
        step_(step),
        program_(trace_of(input), input.model.units.size()),
        uses_(trace, input.model.units.size()),
        compiler_(input, program_, uses_, true) {
    const bool has_gradients = std::ranges::find(trace, Phase::backward, &Visit::phase) != trace.end();
    require(!input.updates_by_layers() || !has_gradients, Code::out_of_order, [] {
      return Problem{.what =
                         "cannot use units in another order than that of the plan: units are updated in the backward "
                         "pass of several micro-steps",
                     .needed = "the uses of Schedule::layer_major in the order of TrainingOptions::trace"};
    });
    compiler_.begin_step();
    compiler_.parameters().gathered().take_over(step.gathered);
    take_over();
  }

  // Emits the visits of the trace beyond those of the step.
  std::vector<Op> rest_of_visits() {
    const Trace& trace = uses_.trace();
    std::vector<std::size_t> updated;
    for (std::size_t i = step_.visits.size(); i < trace.size(); ++i) {
      require_old(trace[i]);
      if (trace[i].phase == Phase::backward && compiler_.completes(0, i)) updated.push_back(trace[i].unit);
    }
    compiler_.records().follow(updated);
    add_rendezvous(trace.back().phase, trace.back().unit);
    for (std::size_t i = step_.visits.size(); i < trace.size(); ++i) {
      compiler_.visit(in_.micro_steps - 1, i);
    }
    return compiler_.context().builder.step(0, 0);
  }

  // Returns the units that are gathered after these visits, by their last use.
  std::vector<GatheredUnit> gathered() {
    return compiler_.parameters().gathered().by_last_use(std::span(uses_.trace()).subspan(step_.visits.size()));
  }

  // Computes the norm anew, because a unit may have got more gradients since the program added it to the norm.
  std::vector<Op> rest_of_step() {
    const std::vector<bool> in_backward(in_.model.units.size(), in_.schedule.update_in_backward);
    std::vector<std::size_t> units = update_order(in_, uses_, in_backward);
    std::erase_if(units, [&](std::size_t unit) { return compiler_.is_updated(unit); });
    compiler_.records().follow(units);
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
    return compiler_.context().builder.step(0, 0);
  }

 private:
  // Takes over from the uses that the trainer has made so far: where gradients are, and which units have been updated.
  void take_over() {
    for (std::size_t i = 0; i < step_.visits.size(); ++i) {
      const std::size_t unit = step_.visits[i].unit;
      if (step_.visits[i].phase != Phase::backward || in_.layout.units[unit].trained.count() == 0) continue;
      compiler_.gradients().take_over(unit);
      if (was_updated(i)) compiler_.set_updated(unit);
    }
  }

  bool was_updated(std::size_t position) const {
    if (!in_.schedule.update_in_backward) return false;
    const std::size_t unit = step_.visits[position].unit;
    return position < step_.by_program ? program_.last_backward(unit) < step_.by_program
                                       : !compiler_.update_can_wait(unit);
  }

  void require_old(const Visit& visit) const {
    require(!compiler_.is_updated(visit.unit), Code::out_of_order, [&] {
      return Problem{
          .what =
              fmt::format("cannot use the unit in {}: it has been updated in this backward pass", name(visit.phase)),
          .where = "unit " + in_.model.units[visit.unit].name,
          .needed = "one backward use of each unit in a step, its last use; or updates after the backward pass"};
    });
  }

  // No rank goes off plan alone: in each lane it waits here for the others, which find that it makes another call. After
  // this, all ranks have committed the last step, so writes that follow no agreement wait for it.
  void add_rendezvous(Phase phase, std::size_t unit) {
    const auto add = [&](Lane lane, Ranks ranks) {
      return compiler_.context().builder.add(
          {.kind = OpKind::meet, .lane = lane, .phase = phase, .unit = unit, .ranks = ranks});
    };
    add(Lane::gather, Ranks::shard_group);
    compiler_.context().agreement = {add(Lane::reduce, Ranks::shard_group)};
    if (in_.placement.groups() > 1) compiler_.context().agreement = {add(Lane::reduce, Ranks::replica_group)};
  }

  const CompileInput& in_;
  const OffPlanStep& step_;
  Uses program_;
  Uses uses_;
  StepCompiler compiler_;
};

// Emits what replaces early updates.
class RepeatCompiler {
 public:
  explicit RepeatCompiler(const CompileInput& input)
      : uses_(trace_of(input), input.model.units.size()),
        units_(forward_order(input, uses_)),
        compiler_(input, uses_, uses_, true) {
    compiler_.begin_step();
    compiler_.context().builder.add({.kind = OpKind::abandon, .lane = Lane::disk});
    compiler_.records().read_kept();  // updates have changed them
  }

  std::vector<Op> repeat() {
    compiler_.records().follow(units_);
    for (const std::size_t unit : units_) {
      if (uses_.backward_visits(unit) > 0) compiler_.gradients().take_sum(unit);
    }
    compiler_.update_rest();
    compiler_.commit({});
    return compiler_.context().builder.step(0, 0);
  }

  std::vector<Op> undo() {
    std::erase_if(units_, [&](std::size_t unit) {
      return !compiler_.is_early(unit) || compiler_.context().residence(unit).parameters == Tier::nvme;
    });
    compiler_.records().follow(units_);
    std::ranges::for_each(units_, [&](std::size_t unit) { compiler_.updates().restore(unit); });
    return compiler_.context().builder.step(0, 0);
  }

 private:
  Uses uses_;
  std::vector<std::size_t> units_;
  StepCompiler compiler_;
};

}  // namespace

// A step begins with what the one before left, so this emits two steps: the second has the waits of every later one.
Program compile(const CompileInput& input) {
  check(input);
  const Uses uses(trace_of(input), input.model.units.size());
  StepCompiler compiler(input, uses, uses);
  Builder& builder = compiler.context().builder;
  Program program = without_operations(compiler.context().slots);
  compiler.enter();
  program.entry = builder.step(0, 0);
  builder = Builder(program.slots);
  add_step(compiler);
  const std::size_t second = builder.size();
  add_step(compiler);
  program.ops = builder.step(0, second);
  if (input.schedule.overlap_gathers) mark_updates(program);
  return program;
}

Program outline(const CompileInput& input) {
  check(input);
  return without_operations(StepSlots(input, Uses(trace_of(input), input.model.units.size())));
}

std::vector<Op> compile_visits(const CompileInput& input, OffPlanStep& step, const Trace& chain) {
  Trace trace = step.visits;
  trace.insert(trace.end(), chain.begin(), chain.end());
  OffPlanCompiler compiler(input, step, trace);
  std::vector<Op> ops = compiler.rest_of_visits();
  step.gathered = compiler.gathered();
  return ops;
}

std::vector<Op> compile_step(const CompileInput& input, const OffPlanStep& step) {
  return OffPlanCompiler(input, step, step.visits).rest_of_step();
}

std::vector<Op> compile_repeat(const CompileInput& input) { return RepeatCompiler(input).repeat(); }
std::vector<Op> compile_undo(const CompileInput& input) { return RepeatCompiler(input).undo(); }

void require_groups(const Model& model, std::size_t groups) {
  for (const Unit& unit : model.units) {
    for (const Tensor& tensor : unit.tensors) {
      require(tensor.frozen || tensor.group < groups, Code::bad_argument, [&] {
        return Problem{.what = fmt::format("cannot train: {} parameter groups are too few", groups),
                       .where = fmt::format("unit {}, tensor {}", unit.name, tensor.name),
                       .needed = fmt::format("group {}", tensor.group)};
      });
    }
  }
}

void require_clipping(bool update_in_backward, double max_norm) {
  optim::check_max_norm(max_norm);
  require(!update_in_backward || max_norm == optim::no_clipping, Code::bad_argument, [] {
    return Problem{.what = "cannot clip gradients: update_in_backward updates parameters before the norm is known",
                   .needed = "no max_norm, or updates after the backward pass"};
  });
}

CompiledPlan::CompiledPlan(Model model, const PlanOptions& options)
    : model_(std::move(model)),
      cut_(model_, options),
      program_(compile(input())),
      matrix_groups_(input().needs_matrices() ? MatrixGroups(model_) : MatrixGroups()) {
  for (const Home& home : program_.homes) {
    if (home.on_drive) (home.frozen ? frozen_ : records_).emplace_back(home.unit, home.tile);
  }
}

std::size_t CompiledPlan::record_of(std::size_t unit, std::size_t tile) const {
  const auto& records = layout().units[unit].is_frozen(tile) ? frozen_ : records_;
  return static_cast<std::size_t>(std::ranges::lower_bound(records, std::pair(unit, tile)) - records.begin());
}

}  // namespace ballast
