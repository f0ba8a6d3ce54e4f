// The CUDA kernels of the layers, which maths_cuda.cpp calls. They take plain structs only: nvcc does not compile
// views.
#pragma once

#include "kernels/cuda.h"
#include "kernels/numbers.h"

namespace ballast::gpt::cuda {

using kernels::ConstNumbers;
using kernels::Cuda;
using kernels::Numbers;

// Sets each row to the bias, or adds the bias to it. Does nothing without a bias.
void begin_rows(const Cuda& cuda, const ConstNumbers& bias, const Numbers& to, bool add);
void add_rows(const Cuda& cuda, const ConstNumbers& rows, const Numbers& into);  // `into`'s count is the rows' width

void gelu(const Cuda& cuda, const ConstNumbers& x, const Numbers& to);
void gelu_backward(const Cuda& cuda, const ConstNumbers& x, const Numbers& gradient);

struct Norm {
  ConstNumbers x;
  ConstNumbers weight;
  ConstNumbers bias;
  float* moments;  // two for each row
};
struct NormGradients {
  Numbers x;
  Numbers weight;
  Numbers bias;
};
void layer_norm(const Cuda& cuda, const Norm& norm, const Numbers& to);
void layer_norm_backward(const Cuda& cuda, const Norm& norm, const ConstNumbers& gradient, const NormGradients& into);

// Scores of heads, each a matrix of context x context. causal_softmax() replaces them by softmaxes up to the diagonal
// and zeros after it, in place and in `weights`.
struct Scores {
  float* scores;
  std::size_t heads;
  std::size_t context;
  float scale;
};
void causal_softmax(const Cuda& cuda, const Scores& scores, const Numbers& weights);
void causal_softmax_backward(const Cuda& cuda, const Scores& softmax, const float* slopes, const Numbers& weights);

struct Text {
  const std::uint8_t* bytes;
  std::size_t count;
  std::size_t width;    // the width of a row of a table
  std::size_t context;  // rows of the table of positions
};
void embed(const Cuda& cuda, const Text& text, const ConstNumbers& tokens, const ConstNumbers& positions,
           const Numbers& to);
void embed_backward(const Cuda& cuda, const Text& text, const ConstNumbers& gradient, const Numbers& tokens,
                    const Numbers& positions);

// `text` holds the targets; its width is that of the logits.
void cross_entropy(const Cuda& cuda, const Text& text, const float* logits, float* losses, const Numbers& gradient);

}  // namespace ballast::gpt::cuda
