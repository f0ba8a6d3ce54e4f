// The arithmetic of a GPT's layers: one interface for CPUs and GPUs, over which the model is written once.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "examples/gpt/matrix.h"
#include "kernels/runtime/buffer.h"
#include "kernels/runtime/device.h"

namespace ballast::gpt {

struct LayerNorm {
  ConstView weight;
  ConstView bias;
};

struct LayerNormGradients {
  View weight;
  View bias;
  View input;
};

// A causal attention. A row of qkv holds the queries, keys and values of a position, each for all heads.
struct AttentionShape {
  std::size_t batch = 0;
  std::size_t context = 0;
  std::size_t heads = 0;
  std::size_t head_width = 0;

  std::size_t width() const { return heads * head_width; }
};

// A head's columns in the rows of one sequence.
template <class AnyMatrix>
struct HeadOf {
  AnyMatrix query;
  AnyMatrix key;
  AnyMatrix value;
};

// `number` counts the heads of all sequences.
template <class AnyView>
auto head_of(const AttentionShape& shape, const AnyView& qkv, std::size_t number) {
  const auto all = matrix(qkv, 3 * shape.width());
  const std::size_t row = number / shape.heads * shape.context;
  const std::size_t column = number % shape.heads * shape.head_width;
  const auto third = [&](std::size_t which) {
    return all.part(row, shape.context, which * shape.width() + column, shape.head_width);
  };
  return HeadOf<decltype(third(0))>{third(0), third(1), third(2)};
}

template <class AnyView>
auto output_of_head(const AttentionShape& shape, const AnyView& output, std::size_t number) {
  return matrix(output, shape.width())
      .part(number / shape.heads * shape.context, shape.context, number % shape.heads * shape.head_width,
            shape.head_width);
}

template <class AnyView>
struct Tables {
  AnyView tokens{};     // a row for each byte
  AnyView positions{};  // a row for each position
};

// The targets of the predictions, and the memory for losses and gradients.
struct Targets {
  ConstView bytes;
  View losses;    // the loss of each position, in fp32
  View gradient;  // the gradient of the mean loss
};

// Memory is fp32 or bf16, tokens are bytes, and sums are in fp32. Gradients are added to the existing values, except
// those of whole activations. One thread uses it. On a GPU a call returns when its work is in the stream.
class Maths {
 public:
  virtual ~Maths() = default;
  virtual std::string library() const = 0;
  virtual MemoryKind memory() const = 0;  // the kind of memory that it computes on
  virtual int gpu() const { return 0; }   // the owner of that memory, if it is device memory

  virtual void multiply(const Product& product) = 0;
  virtual void add_rows(const ConstMatrix& rows, const View& into) = 0;  // adds the sum of all rows to `into`
  virtual void clear(const View& to) = 0;                                // zeros
  virtual void copy(const ConstView& from, const View& to) = 0;
  virtual void gelu(const ConstView& x, const View& to) = 0;
  virtual void gelu_backward(const ConstView& x, const View& gradient) = 0;  // gradient *= gelu'(x)
  virtual void layer_norm(const ConstView& x, const LayerNorm& norm, const View& to) = 0;
  virtual void layer_norm_backward(const ConstView& x, const LayerNorm& norm, const ConstView& gradient,
                                   const LayerNormGradients& into) = 0;
  virtual void attention(const AttentionShape& shape, const ConstView& qkv, const View& to) = 0;
  virtual void attention_backward(const AttentionShape& shape, const ConstView& qkv, const ConstView& gradient,
                                  const View& qkv_gradient) = 0;
  virtual void embed(const ConstView& bytes, const Tables<ConstView>& tables, const View& to) = 0;
  virtual void embed_backward(const ConstView& bytes, const ConstView& gradient, const Tables<View>& into) = 0;
  virtual void cross_entropy(const ConstView& logits, const Targets& targets) = 0;  // logits in fp32

  virtual void upload(std::span<const std::byte> from, const View& to) = 0;
  virtual void download(const ConstView& from, std::span<std::byte> to) = 0;  // waits for it
  virtual void finish() = 0;                                                  // waits for all
};

// The bits of its results do not depend on the number of threads.
std::unique_ptr<Maths> cpu_maths(int threads);

// Computes in a stream of a GPU, which outlives it. Throws B2101 in a build without CUDA or cuBLAS.
std::unique_ptr<Maths> gpu_maths(StreamHandle stream, int gpu);

}  // namespace ballast::gpt
