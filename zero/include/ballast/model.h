// The model as units of tensors. The parameters of a unit are gathered together; a transformer block is a typical unit.
#pragma once

#include <ballast/view.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ballast {

// Elements of a tensor or of a unit.
struct Range {
  std::size_t first = 0;
  std::size_t count = 0;

  std::size_t end() const { return first + count; }
  bool operator==(const Range&) const = default;
};

struct Tensor {
  // The tensor's name in checkpoints and in safetensors files, if no other tensor of the model has it; else the name there is that of
  // its unit and this one, joined by a dot.
  std::string name;
  std::vector<std::size_t> shape;
  std::size_t group = 0;  // a group of parameters with the same options: a number, which Model::group() gives a name
  bool frozen = false;    // has neither gradient nor optimizer state
  // Whether the norm of all gradients counts it; if not, another rank has the same tensor and counts it.
  bool counted = true;
  // Random bits of the tensor's elements depend on it, so two models that are cut into different units round in the same
  // way if they have the same numbers. None: the tensor's place in the order of declaration.
  std::optional<std::uint64_t> number{};
  // The rows of each block of a matrix that a rule of whole matrices treats apart, such as a head, or q, k and v in
  // one. Empty: the matrix is one block.
  std::vector<std::size_t> blocks{};

  std::size_t elements() const;
};

// A tensor of another unit that a unit uses too, such as an embedding that is also the last layer's weight.
struct Tie {
  std::string name;
  std::size_t unit = 0;
  std::size_t tensor = 0;
};

// The place of a tensor in a model.
struct TensorId {
  std::size_t unit = 0;
  std::size_t tensor = 0;  // its number in the unit

  bool operator==(const TensorId&) const = default;
};

struct Unit {
  std::string name;
  DType dtype = DType::bf16;  // u8: opaque bytes, all of them frozen, which no collective encodes
  std::vector<Tensor> tensors{};
  std::vector<Tie> ties{};
  // So many neighbouring ranks have other parts of the unit, such as experts, each with tensors of these shapes. Ranks with the same
  // part sum their gradients and share its state. The norm includes all parts, and sums are averaged as those of other units.
  std::size_t parts = 1;
};

struct Model {
  std::vector<Unit> units{};
  std::vector<std::string> groups{};  // the names of the parameter groups, by number; none: they have numbers alone

  // Begins a unit, and adds tensors and ties to the last one. A lease of the unit has a tied tensor by its owner's id.
  std::size_t unit(std::string name, DType dtype = DType::bf16);
  TensorId tensor(Tensor tensor);
  TensorId tied(std::string name, TensorId owner);
  std::size_t group(std::string_view name);  // its number; a new name gets the next one
};

// Returns the largest number of parts of a unit.
std::size_t parts_of(const Model& model);

// Throws B1001 for a model without units, an unknown unit in a tie, two units or tensors of one name, trained bytes,
// blocks that are not all rows of a matrix.
void check(const Model& model);

}  // namespace ballast
