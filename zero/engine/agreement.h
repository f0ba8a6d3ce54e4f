// The decision of a step: the norm over all ranks, whether to update, and with which factors.
#pragma once

#include <ballast/lease.h>
#include <ballast/step.h>

#include <vector>

#include "kernels/runtime/buffer.h"
#include "optim/step.h"
#include "zero/engine/arithmetic.h"
#include "zero/engine/mesh.h"
#include "zero/engine/step_run.h"
#include "zero/plan/program.h"

namespace ballast {

// An operation that takes the norm of gradients that stay where they are.
struct LastingNorm {
  Op norm;
  std::size_t download = none;  // operation that took them there, if the program takes their norm on their way
};

std::vector<LastingNorm> lasting_norms(const std::vector<Op>& list);

// Each tensor's gradients in this rank's shards when they are complete: sums of their squares, for norms of single tensors,
// and their memory. Called by the trainer's thread between steps, when nothing is under way.
class TensorSums {
 public:
  // All arguments outlive this.
  TensorSums(const CompiledPlan& plan, const LaneArithmetic& arithmetic, MemoryAccounts& accounts,
             std::optional<int> gpu)
      : plan_(plan), arithmetic_(arithmetic), accounts_(accounts), gpu_(gpu) {}

  // Returns the sum of each tensor, unit by unit, from the gradients of the norm operations in `list`. Issues all sums,
  // and waits for the GPU once.
  std::vector<kernels::ExactSum> of(const std::vector<Op>& list);

  // Shows the gradients of the norm operations in `list`, which may be changed meanwhile, and then adds their squares up
  // again for `agree`.
  void visit(const std::vector<Op>& list, const Op& agree, const Slots& slots, const GradientVisitor& visit);

 private:
  struct Part {
    const Op* norm;
    std::size_t tensor;  // number among the tensors of all units
    Range range;         // elements of the shard
  };
  // The first number of each unit's tensors among those of all units, and their end.
  std::vector<std::size_t> begins() const;
  std::vector<Part> parts_of(const std::vector<LastingNorm>& norms) const;
  std::span<kernels::ExactSum> host_memory(std::size_t sums);

  const CompiledPlan& plan_;
  const LaneArithmetic& arithmetic_;
  MemoryAccounts& accounts_;
  std::optional<int> gpu_;
  Buffer host_;  // pinned if there is a GPU; reserved by the first call, because few trainings ask for these norms
};

// Which rank the others wait for.
Straggler find_straggler(Mesh& mesh, double own_seconds);  // all ranks call together and get the same

// prepare() and everything between steps is called by the trainer's thread; agree() by the lane of the operation
// `agree`, which was issued after prepare() and is done before the next step begins.
class Agreement {
 public:
  Agreement(const CompiledPlan& plan, Mesh& mesh, const LaneArithmetic& arithmetic, TensorSums& tensor_sums,
            bool sums_micro_steps);
  Agreement(Agreement&&) = delete;

  // check() throws if a step cannot use these options. prepare() copies them for the next step.
  void check(const StepOptions& options) const;
  void prepare(const StepOptions& options);
  // Throw if a step's uses are not those of so many micro-steps: of the prepared one, or before it.
  void check_accumulated(const Trace& visited) const;
  void check_accumulated(const Trace& visited, std::optional<std::size_t> micro_steps) const;
  // The next step leaves it out.
  void leave_out(std::size_t unit, std::size_t tensor) { left_out_.emplace_back(unit, tensor); }
  bool is_prepared() const { return is_prepared_; }
  bool has_custom_update() const { return static_cast<bool>(options_.update); }
  TrainerUpdate take_custom_update();
  void end_step(std::uint64_t steps);  // nothing is prepared any more

  std::uint64_t steps() const { return steps_; }  // updates made so far
  void set_steps(std::uint64_t steps) { steps_ = steps; }

  // Return norms of the summed gradients, before the operation `agree`. All ranks call together. The norms of all
  // tensors, by unit, come from the norm operations in `list`; they need one exchange, as the norm of all does.
  double norm(const Op& agree, double loss_scale, std::optional<std::size_t> micro_steps);
  std::vector<std::vector<double>> tensor_norms(const std::vector<Op>& list, double loss_scale,
                                                std::optional<std::size_t> micro_steps);

  void agree(const Op& op, StepRun& run, double own_seconds);  // fills in numbers and result
  StepNumbers numbers_before_norm() const;                     // numbers for updates in the backward pass

 private:
  optim::Decision decide(const kernels::ExactSum& squares) const;
  StepNumbers numbers_of(const optim::Decision& decision) const;
  void add_tensors(StepNumbers& numbers) const;
  void add_matrices(StepNumbers& numbers) const;
  void sum_over_shards(std::span<kernels::ExactSum> squares) const;
  kernels::ExactSum sum_over_model(const kernels::ExactSum& squares) const;
  std::string first_wrong_parameter(const StepRun& run) const;

  const CompiledPlan& plan_;
  Mesh& mesh_;
  const LaneArithmetic& arithmetic_;
  TensorSums& tensor_sums_;
  bool sums_micro_steps_;
  std::vector<std::size_t> uses_of_micro_step_;  // uses in backward, for each unit
  std::vector<optim::Rule> rules_;
  std::vector<std::uint64_t> missed_;
  StepOptions options_{};                                      // its groups are rules_, its missed is missed_
  std::vector<std::pair<std::size_t, std::size_t>> left_out_;  // unit and tensor
  bool is_prepared_ = false;
  std::uint64_t steps_ = 0;
};

}  // namespace ballast
