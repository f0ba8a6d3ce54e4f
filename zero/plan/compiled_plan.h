// A program with everything that it was compiled from.
#pragma once

#include "zero/plan/compile.h"
#include "zero/plan/matrix_homes.h"

namespace ballast {

// Throws B1001 if a trained tensor is in none of so many parameter groups.
void require_groups(const Model& model, std::size_t groups);

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

}  // namespace ballast
