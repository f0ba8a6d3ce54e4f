// The matrices of a rule that needs them whole, such as Muon: their blocks, the rank where each is whole for an update, and the
// parts that ranks exchange for that. Pure values, the same on every rank.
#pragma once

#include <vector>

#include "kernels/matrix_shape.h"
#include "zero/plan/layout.h"

namespace ballast {

// Neighbouring blocks of one shape in a matrix.
struct MatrixBlocks {
  std::size_t first = 0;  // element of the tensor
  kernels::MatrixShape shape{};

  Range range() const { return {first, shape.elements()}; }
};

std::vector<MatrixBlocks> blocks_of(const Tensor& matrix);
bool is_matrix(const Tensor& tensor);

// A matrix at its home.
struct HomedMatrix {
  std::size_t tensor = 0;
  std::size_t home = 0;   // the rank, by the shard that it keeps
  std::size_t begin = 0;  // element of the memory in which the home has its matrices of the unit
};

struct UnitMatrices {
  std::vector<HomedMatrix> matrices{};  // the most work first
  std::size_t elements = 0;             // elements of that memory: enough on every rank
  double operations = 0;                // operations of one step of the orthogonalization, on the rank with the most
};

// A matrix of a unit goes to the rank that has the least work there so far, then the least in all units before. With
// one rank matrices lie as its shard does, so that nothing moves.
std::vector<UnitMatrices> home_matrices(const Model& model, const Layout& layout);

// The parts that a rank sends to the homes of a unit's matrices, and those that it receives as a home. The way back is the same
// with the two exchanged.
struct MatrixPart {
  std::size_t rank = 0;   // the other one, by its shard
  std::size_t begin = 0;  // element: of the rank's shard, or of its matrices
  std::size_t count = 0;
};
struct MatrixParts {
  std::vector<MatrixPart> in_shard{};
  std::vector<MatrixPart> in_matrices{};
};
MatrixParts parts_of(const Unit& unit, const UnitLayout& layout, const UnitMatrices& homes, std::size_t rank);

// A parameter group's blocks of one shape, which have a learning rate of their own.
struct MatrixGroup {
  std::size_t group = 0;
  kernels::MatrixShape shape{};  // the shape of one block
};

class MatrixGroups {
 public:
  MatrixGroups() = default;
  explicit MatrixGroups(const Model& model);

  const std::vector<MatrixGroup>& all() const { return groups_; }
  // The groups in a range of a unit, by their number in all(), as runs_in() gives parameter groups.
  std::vector<kernels::Run> runs_in(const Unit& unit, const UnitLayout& layout, const Range& range,
                                    std::span<const std::size_t> groups = {}) const;

 private:
  std::vector<MatrixGroup>::const_iterator find(std::size_t group, const kernels::MatrixShape& shape) const;

  std::vector<MatrixGroup> groups_;
};

}  // namespace ballast
