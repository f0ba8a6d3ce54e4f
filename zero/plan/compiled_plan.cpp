#include "zero/plan/compiled_plan.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>

namespace ballast {

void require_groups(const Model& model, std::size_t groups) {
  for (const Unit& unit : model.units) {
    for (const Tensor& tensor : unit.tensors) {
      require(tensor.frozen || tensor.group < groups, Code::bad_argument, [&] {
        return Problem{.what = fmt::format("cannot train: {} parameter groups are too few", groups),
                       .where = fmt::format("unit {}, tensor {}", unit.name, tensor.name),
                       .needed = fmt::format("group {}", tensor.group)};
      });
    }
  }
}

CompiledPlan::CompiledPlan(Model model, const PlanOptions& options)
    : model_(std::move(model)),
      cut_(model_, options),
      program_(compile(input())),
      matrix_groups_(input().needs_matrices() ? MatrixGroups(model_) : MatrixGroups()) {
  for (const Home& home : program_.homes) {
    if (home.on_drive) (home.frozen ? frozen_ : records_).emplace_back(home.unit, home.tile);
  }
}

std::size_t CompiledPlan::record_of(std::size_t unit, std::size_t tile) const {
  const auto& records = layout().units[unit].is_frozen(tile) ? frozen_ : records_;
  return static_cast<std::size_t>(std::ranges::lower_bound(records, std::pair(unit, tile)) - records.begin());
}

}  // namespace ballast
