// Brings the matrices of a unit to their homes, orthogonalizes them there, and brings them back.
#pragma once

#include <memory>
#include <vector>

#include "kernels/orthogonalize.h"
#include "zero/engine/gpu_lanes.h"
#include "zero/engine/mesh.h"
#include "zero/engine/slots.h"
#include "zero/engine/step_numbers.h"
#include "zero/plan/compiled_plan.h"

namespace ballast {

// Each operation is called by its lane's thread. On a GPU the work is issued into the lane's stream.
class MatrixExecutor {
 public:
  // All of it outlives the executor. Without a GPU, `threads` of the CPU multiply.
  MatrixExecutor(const CompiledPlan& plan, Mesh& mesh, const Slots& slots, const GpuLanes* gpu, int threads);

  void collect(const Op& op) const;
  void distribute(const Op& op) const;
  void orthogonalize(const Op& op, const StepNumbers& step) const;

 private:
  template <class Part>
  std::vector<Part> parts(const std::vector<MatrixPart>& of, const Piece& piece) const;
  View values(const Piece& piece, std::size_t begin, std::size_t count) const;

  const CompiledPlan& plan_;
  Mesh& mesh_;
  const Slots& slots_;
  std::vector<std::size_t> rank_of_shard_;  // each shard's rank in the group
  std::vector<UnitMatrices> homes_;         // one for each unit
  std::vector<MatrixParts> parts_;          // one for each unit
  std::unique_ptr<kernels::Orthogonalizer> orthogonalizer_;
};

}  // namespace ballast
