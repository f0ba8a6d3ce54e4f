#include "zero/engine/running_program.h"

#include <algorithm>

namespace ballast {

RunningProgram::RunningProgram(const CompiledPlan& plan) : plan_(plan), input_(plan.input()) { count_memory(); }

CompileInput RunningProgram::input_for(const Trace& trace, bool extra_sum_slots) const {
  CompileInput input = input_;
  input.trace = trace;
  input.extra_sum_slots = extra_sum_slots;
  const auto gathered = std::ranges::find(program().slots, SlotRole::gathered, &Slot::role);
  if (gathered != program().slots.end()) input.gathered_bytes = gathered->bytes;
  return input;
}

std::unique_ptr<const Program> RunningProgram::compile_for(const Trace& trace, bool extra_sum_slots) const {
  return std::make_unique<const Program>(compile(input_for(trace, extra_sum_slots)));
}

void RunningProgram::change_to(std::unique_ptr<const Program> program, const Trace& trace, bool extra_sum_slots) {
  compiled_ = std::move(program);
  input_.trace = trace;
  input_.extra_sum_slots = extra_sum_slots;
  count_memory();
}

void RunningProgram::count_memory() { memory_ = bytes_by_tier(ledger_of(program(), plan_.blocks().records())); }

}  // namespace ballast
