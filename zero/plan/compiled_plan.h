// A program with everything that it was compiled from.
#pragma once

#include "zero/plan/compile.h"
#include "zero/plan/matrix_homes.h"

namespace ballast {

struct PlanOptions {
  Placement placement{};
  std::size_t rank = 0;            // of all ranks: those of a shard group are neighbours
  std::size_t ranks_per_host = 1;  // if each host has as many neighbouring ranks; 1 or less: hosts are not told apart
  std::size_t tile_elements = 0;   // at most in a tile; 0: the sizes of tiling.h
  std::size_t micro_steps = 1;     // backward passes whose gradients one step sums
  StateFormat format = StateFormat::split;
  GradientFormat gradient_format = GradientFormat::fp32;
  optim::StateNames names{};                             // of the state that the optimizer keeps
  std::string rule{};                                    // name of the update rule
  std::optional<std::size_t> orthogonalization_steps{};  // see CompileInput
  Trace trace{};
  Schedule schedule{};
  Wire wire{};
  bool mirror = false;          // each record is written on a drive of another rank too
  bool full_records = false;    // records hold parameters too, so that a run resumes from them alone
  bool host_is_device = false;  // a CPU's
};

// Throws B1001 if a trained tensor is in none of so many parameter groups.
void require_groups(const Model& model, std::size_t groups);

class CompiledPlan {
 public:
  CompiledPlan(Model model, const PlanOptions& options);
  CompiledPlan(CompiledPlan&&) = delete;

  const Model& model() const { return model_; }
  const Layout& layout() const { return layout_; }
  const Blocks& blocks() const { return blocks_; }
  const CompileInput& input() const { return input_; }
  const Placement& placement() const { return input_.placement; }
  const Program& program() const { return program_; }
  const MatrixGroups& matrix_groups() const { return matrix_groups_; }  // none, unless the rule needs whole matrices
  const std::string& rule() const { return rule_; }
  const optim::StateNames& names() const { return names_; }

  std::size_t tiles_on_drive() const { return records_.size(); }  // that are trained
  std::size_t frozen_on_drive() const { return frozen_.size(); }  // tiles of frozen parameters
  bool uses_drives() const { return tiles_on_drive() + frozen_on_drive() > 0; }
  std::size_t record_of(std::size_t unit, std::size_t tile) const;  // its index among those of its kind
  std::pair<std::size_t, std::size_t> tile_of(std::size_t record) const {
    return records_.at(record);
  }  // unit and tile

 private:
  Model model_;
  Layout layout_;
  Blocks blocks_;
  CompileInput input_;
  Program program_;
  MatrixGroups matrix_groups_;
  std::string rule_;
  optim::StateNames names_;
  std::vector<std::pair<std::size_t, std::size_t>> records_;  // unit and tile, in order
  std::vector<std::pair<std::size_t, std::size_t>> frozen_;   // likewise
};

}  // namespace ballast
