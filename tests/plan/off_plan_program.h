// A program whose every step is an off-plan step of another program, or one whose updates are made again: one list of the operations
// that an engine runs.
#pragma once

#include "tests/plan/verify.h"
#include "zero/plan/compile.h"

namespace ballast::testing {

class OffPlanProgram {
 public:
  // Each step follows the input's program for `visits` visits.
  OffPlanProgram(const CompileInput& input, std::size_t visits) : OffPlanProgram(input, visits, true) {}

  // The step follows its program as far as the agreement. Then its updates are made again, or undone.
  static OffPlanProgram with_agreement(const CompileInput& input) {
    OffPlanProgram step(input, trace_of(input).size() * input.micro_steps, false);
    Op agree = *std::ranges::find(step.program_.ops, OpKind::agree, &Op::kind);
    agree.after.clear();
    step.append({agree});
    return step;
  }

  void add(const Trace& chain) {
    append(compile_visits(in_, step_, chain));
    step_.visits.insert(step_.visits.end(), chain.begin(), chain.end());
  }

  std::size_t size() const { return ops_.size(); }
  bool is_early() const { return is_early_; }  // whether units are updated before the end of the step
  std::size_t end_of_step() const { return end_of_step_; }

  Program finish() { return finish(compile_step(in_, step_)); }

  Program finish(const std::vector<Op>& rest) {
    append(rest);
    end_of_step_ = ops_.size();
    append(without_kept_records(program_.entry));
    Program all{program_.slots, program_.homes, program_.entry, ops_};
    for (const std::uint32_t last : last_ones()) {
      for (Op& op : all.ops)
        op.after.push_back({last, true});
    }
    return all;
  }

  std::vector<std::string> verify(const Program& program) const {
    CompileInput input = in_;
    input.trace = step_.visits;
    input.micro_steps = 1;
    return ballast::verify(input, program);
  }

  std::vector<std::string> finish_and_verify() { return verify(finish()); }

 private:
  OffPlanProgram(const CompileInput& input, std::size_t visits, bool undoes) : in_(input), program_(compile(input)) {
    const Trace trace = trace_of(input);
    for (std::size_t i = 0; i < visits; ++i)
      step_.visits.push_back(trace[i % trace.size()]);
    step_.by_program = visits;
    for (const Op& op : program_.ops) {
      if (op.kind == OpKind::agree || (op.kind == OpKind::use && visits-- == 0)) break;
      ops_.push_back(op);
    }
    for (Op& op : ops_)
      std::erase_if(op.after, [](const Wait& wait) { return wait.is_last_steps; });
    is_early_ = !input.schedule.update_in_backward && std::ranges::find(ops_, OpKind::update, &Op::kind) != ops_.end();
    if (is_early_ && undoes) append(compile_undo(in_));
  }

  // Each list begins when everything before it is over.
  void append(const std::vector<Op>& list) {
    const auto begin = static_cast<std::uint32_t>(ops_.size());
    const std::vector<std::uint32_t> before = last_ones();
    for (Op op : list) {
      for (Wait& wait : op.after)
        wait.op += begin;
      for (const std::uint32_t last : before)
        op.after.push_back({last, false});
      ops_.push_back(std::move(op));
    }
  }

  // Returns the operations whose end implies the end of all.
  std::vector<std::uint32_t> last_ones() const {
    std::vector<std::uint32_t> last;
    for (std::uint32_t i = 0; i < ops_.size(); ++i) {
      const auto of_lane = [&](std::uint32_t other) { return ops_[other].lane == ops_[i].lane; };
      if (done_in_order(ops_[i].lane)) std::erase_if(last, of_lane);
      last.push_back(i);
    }
    return last;
  }

  // Leaves out reads of kept records. No operation of the entry waits for them.
  static std::vector<Op> without_kept_records(const std::vector<Op>& entry) {
    std::vector<std::uint32_t> index;
    std::vector<Op> rest;
    for (const Op& op : entry) {
      index.push_back(static_cast<std::uint32_t>(rest.size()));
      if (op.kind == OpKind::read) continue;
      rest.push_back(op);
      for (Wait& wait : rest.back().after)
        wait.op = index[wait.op];
    }
    return rest;
  }

  CompileInput in_;
  Program program_;
  OffPlanStep step_;
  std::vector<Op> ops_;
  bool is_early_ = false;
  std::size_t end_of_step_ = 0;
};

}  // namespace ballast::testing
