#include "zero/plan/step_compiler.h"

#include <algorithm>

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

}  // namespace

// Returns the order of the next forward, or the order in which gradients become complete.
std::vector<std::size_t> update_order(const CompileInput& input, const Uses& uses) {
  std::vector<std::size_t> units = forward_order(input, uses);
  if (input.schedule.update_in_backward) {
    std::ranges::stable_sort(units, {}, [&](std::size_t unit) { return uses.last_backward(unit); });
  }
  return units;
}

StepCompiler::StepCompiler(const CompileInput& input, const Uses& of_program, const Uses& uses, bool off_plan)
    : uses_(uses),
      slots_(input, of_program),
      builder_(slots_.all()),
      context_{input, uses_, slots_, builder_, off_plan},
      records_(slots_, builder_, tiles_on_drive(slots_, update_order(input, of_program))),
      parameters_(context_, records_),
      gradients_(context_, waits_),
      updates_(context_, {parameters_.pieces(), gradients_, waits_, records_}),
      matrix_updates_(context_, waits_, updates_) {}

void StepCompiler::enter() {
  slots_.rings.restart();
  updated_.assign(context_.units(), true);
  for (std::size_t unit = 0; unit < context_.units(); ++unit) {
    gather_kept(unit);
    parameters_.gather_kept_frozen(unit);
  }
  records_.read_kept();
  hoist();
}

void StepCompiler::begin_step() {
  slots_.rings.restart();
  gradients_.begin_step();
  waits_.begin_step();
  records_.begin_step();
  updated_.assign(context_.units(), false);
  hoisted_ = 0;
}

void StepCompiler::visit(std::size_t micro_step, std::size_t position) {
  const Trace& trace = uses_.trace();
  const Visit& visit = trace[position];
  if (position == 0 || !trace[position - 1].held) parameters_.ensure_chain_gathered(position);
  parameters_.prefetch(micro_step, position);
  gradients_.prepare(position);
  const Piece gradients = visit.phase == Phase::backward ? gradients_.of_use(position) : Piece{};
  builder_.add({.kind = OpKind::use,
                .lane = Lane::compute,
                .phase = visit.phase,
                .unit = visit.unit,
                .from = parameters_.pieces().full(visit.unit),
                .to = gradients,
                .exact = visit.exact});
  if (!gradients.exists()) return;
  const bool complete = completes(micro_step, position);
  gradients_.add_use(position, complete);
  if (complete && context_.input.schedule.update_in_backward) update(visit.unit);
}

// Off plan, gradients are complete only where they have to be: where an update is due that cannot wait for the end.
bool StepCompiler::completes(std::size_t micro_step, std::size_t position) const {
  const CompileInput& in = context_.input;
  if (context_.off_plan) return in.schedule.update_in_backward && !update_can_wait(uses_.trace()[position].unit);
  return micro_step + 1 == in.micro_steps && uses_.is_last_backward(position);
}

bool StepCompiler::update_can_wait(std::size_t unit) const {
  return context_.input.placement.reduction == Reduction::boundary || slots_.of(unit).reduced != none;
}

void StepCompiler::update(std::size_t unit) {
  begin_update(unit);
  end_updates(0);
}

void StepCompiler::begin_update(std::size_t unit) {
  parameters_.drop(unit);
  context_.input.needs_matrices() ? matrix_updates_.begin(unit) : updates_.update(unit);
  begun_.push_back(unit);
}

void StepCompiler::end_updates(std::size_t but) {
  for (; begun_.size() > but; begun_.pop_front()) {
    const std::size_t unit = begun_.front();
    if (context_.input.needs_matrices()) matrix_updates_.end(unit);
    updated_[unit] = true;
    gather_kept(unit);
  }
}

// Its records come after those of the units before it.
void StepCompiler::leave(std::size_t unit) {
  end_updates(0);
  updates_.carry_over(unit);
  updated_[unit] = true;
  gather_kept(unit);
}

void StepCompiler::end_step() {
  parameters_.drop_all();  // gathered parameters are old when the updates are done
  const std::size_t agreement = builder_.add(
      {.kind = OpKind::agree, .lane = Lane::reduce, .to = slots_.norm(Tier::device), .state = slots_.norm(Tier::host)},
      waits_.take_last_commit());
  if (!context_.input.schedule.update_in_backward) waits_.set_agreed(agreement);
  for (const std::size_t unit : forward_order(context_.input, uses_)) {
    if (!updated_[unit]) {
      if (uses_.backward_visits(unit) > 0) {
        begin_update(unit);
        end_updates(slots_.updates_at_once() - 1);
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
  if (records_.any()) waits_.set_committed(builder_.add({.kind = OpKind::commit, .lane = Lane::disk}, {agreement}));
}

// After an off-plan step the entry does this.
void StepCompiler::gather_kept(std::size_t unit) {
  if (!context_.off_plan) parameters_.gather_kept(unit);
}

// The next step's first gathers, of units whose parameters are that step's already: as far ahead as `prefetch` says, and further
// while no other unit has to go. So with memory for all units (keep_gathered) no link is idle until the next forward. After an
// off-plan step the entry does this.
void StepCompiler::hoist() {
  if (context_.off_plan) return;
  const Trace& trace = uses_.trace();
  const std::size_t near = uses_.end_of_units(0, context_.input.schedule.prefetch, trace.size());
  for (; hoisted_ < trace.size(); ++hoisted_) {
    const std::size_t unit = trace[hoisted_].unit;
    if (!updated_[unit] || !(hoisted_ < near || parameters_.has_spare_memory(unit))) return;
    if (!parameters_.ensure_gathered(unit, 0, hoisted_)) return;
  }
}

}  // namespace ballast
