// Each tensor's gradients in this rank's shards when they are complete: sums of their squares, for norms of single tensors, and
// their memory.
#pragma once

#include <ballast/lease.h>

#include <vector>

#include "kernels/runtime/buffer.h"
#include "zero/engine/arithmetic.h"
#include "zero/plan/program.h"

namespace ballast {

// An operation that takes the norm of gradients that stay where they are.
struct LastingNorm {
  Op norm;
  std::size_t download = none;  // operation that took them there, if the program takes their norm on their way
};

std::vector<LastingNorm> lasting_norms(const std::vector<Op>& list);

// Called by the trainer's thread between steps, when nothing is under way.
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

}  // namespace ballast
