// Turns a model, its layout and a placement into the program of a training step. Pure: no threads, clock, CUDA or
// files.
#pragma once

#include "zero/plan/compile_input.h"
#include "zero/plan/matrix_homes.h"

namespace ballast {

// An off-plan step: one in which the trainer has left the program's order.
struct OffPlanStep {
  Trace visits{};                        // so far, in all micro-steps
  std::size_t by_program = 0;            // how many of them, from the first on, the program's operations served
  std::vector<GatheredUnit> gathered{};  // what the last list has left in memory, the one that was used last at the end
};

// Calls check(), which may throw, before anything else.
Program compile(const CompileInput& input);

// Return the operations of an off-plan step, which replace the rest of the program, in the program's slots: a list for
// each use, with the units that are held together, and one for the end of the step. A list begins when everything
// before it is over, and does nothing ahead. It uses what the one before has gathered. After the last one the engine runs
// the program's entry. Throw B1007 for a unit that has been updated already, B2004 for a unit that does not fit.
std::vector<Op> compile_visits(const CompileInput& input, OffPlanStep& step, const Trace& chain);
std::vector<Op> compile_step(const CompileInput& input, const OffPlanStep& step);

// Return what follows the agreement of a step that has updated units early, and needs other updates than those. Both bring back the
// records of the last step. The first makes all updates of the step, from the sums of gradients, and commits; the second brings
// the parameters in memory back too, and makes no updates. They begin when everything before them is over, and the program's
// entry follows.
std::vector<Op> compile_repeat(const CompileInput& input);
std::vector<Op> compile_undo(const CompileInput& input);

// Returns the program without its operations, for callers that need its memory only. Takes much less work.
Program outline(const CompileInput& input);

// Throws B1001 if a trained tensor is in none of so many parameter groups.
void require_groups(const Model& model, std::size_t groups);
// Likewise if it cannot clip its gradients to this norm.
void require_clipping(bool update_in_backward, double max_norm);

// A program with everything that it was compiled from.
class CompiledPlan {
 public:
  CompiledPlan(Model model, const PlanOptions& options);
  CompiledPlan(CompiledPlan&&) = delete;

  const Model& model() const { return model_; }
  const Layout& layout() const { return cut_.layout; }
  const Blocks& blocks() const { return cut_.blocks; }
  const CompileInput& input() const { return cut_.input; }
  const Placement& placement() const { return input().placement; }
  const Program& program() const { return program_; }
  const MatrixGroups& matrix_groups() const { return matrix_groups_; }  // none, unless the rule needs whole matrices
  const std::string& rule() const { return input().rule; }
  const optim::StateNames& names() const { return input().names; }

  std::size_t tiles_on_drive() const { return records_.size(); }  // that are trained
  std::size_t frozen_on_drive() const { return frozen_.size(); }  // tiles of frozen parameters
  bool uses_drives() const { return tiles_on_drive() + frozen_on_drive() > 0; }
  std::size_t record_of(std::size_t unit, std::size_t tile) const;  // its index among those of its kind
  // Returns the unit and the tile.
  std::pair<std::size_t, std::size_t> tile_of(std::size_t record) const { return records_.at(record); }

 private:
  Model model_;
  CutModel cut_;
  Program program_;
  MatrixGroups matrix_groups_;
  std::vector<std::pair<std::size_t, std::size_t>> records_;  // unit and tile, in order
  std::vector<std::pair<std::size_t, std::size_t>> frozen_;   // likewise
};

class Plan;
const CompiledPlan& compiled(const Plan& plan);

}  // namespace ballast
