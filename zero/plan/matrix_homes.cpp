#include "zero/plan/matrix_homes.h"

#include <algorithm>

#include "kernels/runtime/sizes.h"

namespace ballast {
namespace {

double operations_of(const Tensor& matrix) {
  double operations = 0;
  for (const MatrixBlocks& blocks : blocks_of(matrix))
    operations += kernels::operations_of_step(blocks.shape);
  return operations;
}

// The trained tensors of a unit, the most work first.
std::vector<HomedMatrix> by_work(const Unit& unit) {
  std::vector<HomedMatrix> matrices;
  for (std::size_t tensor = 0; tensor < unit.tensors.size(); ++tensor) {
    if (!unit.tensors[tensor].frozen && unit.tensors[tensor].elements() > 0) matrices.push_back({.tensor = tensor});
  }
  std::ranges::stable_sort(matrices, std::ranges::greater(),
                           [&](const HomedMatrix& matrix) { return operations_of(unit.tensors[matrix.tensor]); });
  return matrices;
}

}  // namespace

bool is_matrix(const Tensor& tensor) { return tensor.shape.size() == 2; }

std::vector<MatrixBlocks> blocks_of(const Tensor& matrix) {
  std::vector<MatrixBlocks> found;
  std::size_t first = 0;
  for (const std::size_t rows : matrix.blocks.empty() ? std::vector{matrix.shape[0]} : matrix.blocks) {
    if (!found.empty() && found.back().shape.rows == rows) {
      ++found.back().shape.count;
    } else {
      found.push_back({first, {.rows = rows, .columns = matrix.shape[1]}});
    }
    first += rows * matrix.shape[1];
  }
  return found;
}

std::vector<UnitMatrices> home_matrices(const Model& model, const Layout& layout) {
  std::vector<double> in_all(layout.shards);  // work of each rank
  std::vector<UnitMatrices> units;
  for (std::size_t i = 0; i < model.units.size(); ++i) {
    UnitMatrices& unit = units.emplace_back(UnitMatrices{.matrices = by_work(model.units[i])});
    std::vector<double> in_unit(layout.shards);
    std::vector<std::size_t> elements(layout.shards);
    for (HomedMatrix& matrix : unit.matrices) {
      for (std::size_t rank = 1; rank < layout.shards; ++rank) {
        const auto has_less =
            std::pair(in_unit[rank], in_all[rank]) < std::pair(in_unit[matrix.home], in_all[matrix.home]);
        if (has_less) matrix.home = rank;
      }
      const Tensor& tensor = model.units[i].tensors[matrix.tensor];
      in_unit[matrix.home] += operations_of(tensor);
      matrix.begin = layout.shards == 1 ? layout.units[i].tensor_begin[matrix.tensor] : elements[matrix.home];
      elements[matrix.home] = round_up(matrix.begin + tensor.elements(), group_size);
      unit.elements = std::max(unit.elements, elements[matrix.home]);
    }
    for (std::size_t rank = 0; rank < layout.shards; ++rank)
      in_all[rank] += in_unit[rank];
    unit.operations = std::ranges::max(in_unit);
  }
  return units;
}

MatrixParts parts_of(const Unit& unit, const UnitLayout& layout, const UnitMatrices& homes, std::size_t rank) {
  MatrixParts parts;
  for (const HomedMatrix& matrix : homes.matrices) {
    for (const TensorPart& part : owners_of(unit, layout, matrix.tensor, {0, unit.tensors[matrix.tensor].elements()})) {
      if (part.rank == rank) parts.in_shard.push_back({matrix.home, part.in_shard, part.range.count});
      if (matrix.home == rank) {
        parts.in_matrices.push_back({part.rank, matrix.begin + part.range.first, part.range.count});
      }
    }
  }
  return parts;
}

MatrixGroups::MatrixGroups(const Model& model) {
  for (const Unit& unit : model.units) {
    for (const Tensor& tensor : unit.tensors) {
      if (tensor.frozen) continue;
      for (const auto& [first, shape] : blocks_of(tensor)) {
        if (find(tensor.group, shape) == groups_.end()) groups_.push_back({tensor.group, {shape.rows, shape.columns}});
      }
    }
  }
}

std::vector<MatrixGroup>::const_iterator MatrixGroups::find(std::size_t group,
                                                            const kernels::MatrixShape& shape) const {
  return std::ranges::find_if(groups_, [&](const MatrixGroup& one) {
    return one.group == group && one.shape.rows == shape.rows && one.shape.columns == shape.columns;
  });
}

std::vector<kernels::Run> MatrixGroups::runs_in(const Unit& unit, const UnitLayout& layout, const Range& range,
                                                std::span<const std::size_t> groups) const {
  std::vector<kernels::Run> runs;
  for (const kernels::Run& run : ballast::runs_in(unit, layout, range, groups)) {
    const auto tensor = std::ranges::find(layout.tensor_begin, run.tensor_begin);
    const Tensor& matrix = unit.tensors[static_cast<std::size_t>(tensor - layout.tensor_begin.begin())];
    for (const MatrixBlocks& blocks : blocks_of(matrix)) {
      const Range block_range{run.tensor_begin + blocks.first, blocks.shape.elements()};
      const Range common = intersection(block_range, {range.first + run.begin, run.count});
      if (common.count == 0) continue;
      kernels::Run& group_run =
          runs.emplace_back(kernels::part(run, common.first - range.first - run.begin, common.count));
      group_run.group = static_cast<std::size_t>(find(run.group, blocks.shape) - groups_.begin());
    }
  }
  return runs;
}

}  // namespace ballast
