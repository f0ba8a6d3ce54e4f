#include "zero/plan/compile.h"

#include <fmt/format.h>

#include "kernels/runtime/error.h"
#include "zero/plan/homes.h"
#include "zero/plan/step_compiler.h"

namespace ballast {
namespace {

void check(const CompileInput& input) {
  check(input.model);
  check(input.placement);
  const auto refuse = [](std::string what, std::string needed) {
    fail(Code::bad_argument, {.what = std::move(what), .needed = std::move(needed)});
  };
  if (input.model.units.size() != input.layout.units.size() || input.layout.shards != input.placement.shards) {
    refuse(fmt::format("a model of {} units on {} shards came with a layout of {} on {}", input.model.units.size(),
                       input.placement.shards, input.layout.units.size(), input.layout.shards),
           "the layout that make_layout() gives for this model and placement");
  }
  if (input.rank_in_shard_group >= input.placement.shards) {
    refuse(fmt::format("a program for rank {} was asked for", input.rank_in_shard_group),
           fmt::format("a rank below {}", input.placement.shards));
  }
  if (input.micro_steps == 0) refuse("a step of no micro-steps was asked for", "at least one");
  if (input.schedule.staging_slots == 0) refuse("records were to pass through no slots", "at least one");
  if (input.schedule.update_in_backward && input.micro_steps > 1) {
    refuse(fmt::format("updates were asked for in the backward pass of {} micro-steps", input.micro_steps),
           "one micro-step, or updates after the backward pass");
  }
}

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

}  // namespace

Trace trace_of(const CompileInput& input) { return input.trace.empty() ? declared_order(input.model) : input.trace; }

// A step begins with what the one before left, so the second of two shows what its operations wait for.
Program compile(const CompileInput& input) {
  check(input);
  const Trace trace = trace_of(input);
  const Uses uses(trace, input.model.units.size());
  StepCompiler compiler(input, uses, uses);
  Builder& builder = compiler.builder();
  Program program = without_operations(input, compiler.context().slots);
  compiler.enter();
  program.entry = builder.round(0, 0);
  builder = Builder(program.slots);
  add_step(input, trace, compiler);
  const std::size_t second = builder.size();
  add_step(input, trace, compiler);
  program.ops = builder.round(0, second);
  return program;
}

Program outline(const CompileInput& input) {
  check(input);
  const Trace trace = trace_of(input);
  return without_operations(input, StepSlots(input, Uses(trace, input.model.units.size())));
}

}  // namespace ballast
