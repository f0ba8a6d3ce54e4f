// The program that the engine runs: the plan's, until another order of uses is compiled.
#pragma once

#include <memory>

#include "zero/plan/compiled_plan.h"
#include "zero/plan/ledger.h"

namespace ballast {

// Used by the trainer's thread. The engine owns it; only OffPlan changes it.
class RunningProgram {
 public:
  explicit RunningProgram(const CompiledPlan& plan);  // the plan outlives it
  RunningProgram(RunningProgram&&) = delete;

  const CompiledPlan& plan() const { return plan_; }
  const CompileInput& input() const { return input_; }
  const Program& program() const { return compiled_ ? *compiled_ : plan_.program(); }
  const TierBytes& memory() const { return memory_; }  // bytes of its slots

  // Compiles for the same memory for gathered units. `extra_sum_slots`: see CompileInput.
  std::unique_ptr<const Program> compile_for(const Trace& trace, bool extra_sum_slots) const;
  void change_to(std::unique_ptr<const Program> program, const Trace& trace, bool extra_sum_slots);

 private:
  CompileInput input_for(const Trace& trace, bool extra_sum_slots) const;
  void count_memory();

  const CompiledPlan& plan_;
  CompileInput input_;
  std::unique_ptr<const Program> compiled_{};  // replaces the plan's, if not null
  TierBytes memory_{};
};

}  // namespace ballast
