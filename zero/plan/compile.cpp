#include "zero/plan/compile.h"

#include "zero/plan/homes.h"
#include "zero/plan/step_compiler.h"

namespace ballast {
namespace {

Program without_operations(const CompileInput& input, const StepSlots& slots) {
  return {.slots = slots.all(), .homes = homes_of(input, slots), .entry = {}, .ops = {}};
}

void add_step(const CompileInput& input, const Trace& trace, StepCompiler& compiler) {
  compiler.begin_step();
  for (std::size_t micro_step = 0; micro_step < input.micro_steps; ++micro_step) {
    for (std::size_t position = 0; position < trace.size(); ++position) {
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

}  // namespace

// A step begins with what the one before left, so this emits two steps: the second has the waits of every later one.
Program compile(const CompileInput& input) {
  check(input);
  const Trace trace = trace_of(input);
  const Uses uses(trace, input.model.units.size());
  StepCompiler compiler(input, uses, uses);
  Builder& builder = compiler.builder();
  Program program = without_operations(input, compiler.context().slots);
  compiler.enter();
  program.entry = builder.step(0, 0);
  builder = Builder(program.slots);
  add_step(input, trace, compiler);
  const std::size_t second = builder.size();
  add_step(input, trace, compiler);
  program.ops = builder.step(0, second);
  if (input.schedule.overlap_gathers) mark_updates(program);
  return program;
}

Program outline(const CompileInput& input) {
  check(input);
  const Trace trace = trace_of(input);
  return without_operations(input, StepSlots(input, Uses(trace, input.model.units.size())));
}

}  // namespace ballast
