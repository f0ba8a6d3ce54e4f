// The units and tensors of a GPT, and their initial values.
#pragma once

#include <ballast/training.h>

#include <cstdint>

namespace ballast::gpt {

struct Shape {
  std::size_t layers = 8;
  std::size_t width = 768;
  std::size_t heads = 12;
  std::size_t context = 256;
  bool tied = true;  // the head's weight is the embedding's table of tokens
  DType dtype = DType::bf16;

  static constexpr std::size_t vocabulary = 256;  // bytes

  std::size_t blocks_begin() const { return 1; }  // units: the embedding, the blocks, the head
  std::size_t head_unit() const { return layers + 1; }
  std::size_t units() const { return layers + 2; }
};

void check(const Shape& shape);

// The indices of the tensors in each unit.
namespace embedding {
enum Tensors : std::size_t { tokens, positions };
}
namespace block {
enum Tensors : std::size_t {
  norm_weight,
  norm_bias,
  qkv_weight,
  qkv_bias,
  projection_weight,
  projection_bias,
  second_norm_weight,
  second_norm_bias,
  widen_weight,
  widen_bias,
  narrow_weight,
  narrow_bias
};
}
namespace head {
enum Tensors : std::size_t { norm_weight, norm_bias, weight };  // the weight only if it is not tied
}

// The head's own weight, or the table that it is tied to.
inline TensorId head_weight(const Shape& shape) {
  return shape.tied ? TensorId{0, embedding::tokens} : TensorId{shape.head_unit(), head::weight};
}

// Matrices and tables are in parameter group 0, biases and norms in group 1, which has no weight decay.
Model model_of(const Shape& shape);
std::size_t parameters_of(const Model& model);

// Returns the matrix operations for a token, forward and backward, without recomputation: the model FLOPs of MFU.
double operations_of_token(const Shape& shape);
double recomputed_operations_of_token(const Shape& shape);

// Returns initial values as in GPT-2: standard deviations of 0.02, smaller for products into the residual stream. They
// depend on seed and index only.
ParameterSource initial_parameters(const Shape& shape, std::uint64_t seed, int threads = 1);

}  // namespace ballast::gpt
