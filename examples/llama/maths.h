// The arithmetic of a Llama's layers: one interface for CPUs and GPUs, over which the model is written once.
#pragma once

#include <ballast/memory.h>
#include <ballast/view.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace ballast::llama {

// A matrix in memory that the caller owns. Its rows begin `stride` elements apart; if transposed, its columns do.
template <class AnyView>
struct BasicMatrix {
  AnyView memory{};
  std::size_t rows = 0;
  std::size_t columns = 0;
  std::size_t stride = 0;
  bool transposed = false;

  BasicMatrix() = default;
  BasicMatrix(const AnyView& all, std::size_t width)
      : memory(all), rows(all.count() / width), columns(width), stride(width) {}
  template <class Other>
  BasicMatrix(const BasicMatrix<Other>& m)
      : memory(m.memory), rows(m.rows), columns(m.columns), stride(m.stride), transposed(m.transposed) {}

  std::size_t row_step() const { return transposed ? 1 : stride; }
  std::size_t column_step() const { return transposed ? stride : 1; }

  BasicMatrix part(std::size_t row, std::size_t row_count, std::size_t column, std::size_t column_count) const {
    const std::size_t first = row * row_step() + column * column_step();
    const std::size_t last = (row_count - 1) * row_step() + (column_count - 1) * column_step();
    BasicMatrix cut = *this;
    cut.memory = memory.part(first, last + 1);
    cut.rows = row_count;
    cut.columns = column_count;
    return cut;
  }
  BasicMatrix transpose() const {
    BasicMatrix turned = *this;
    std::swap(turned.rows, turned.columns);
    turned.transposed = !transposed;
    return turned;
  }
};
using Matrix = BasicMatrix<View>;
using ConstMatrix = BasicMatrix<ConstView>;

// Computes to = a b, or to += a b. Both factors have one format; sums are fp32.
struct Product {
  ConstMatrix a;
  ConstMatrix b;
  Matrix to;
  bool add = false;
};

// The tokens of a micro-batch, in memory of the maths.
struct Tokens {
  const std::uint32_t* ids = nullptr;
  const std::uint32_t* targets = nullptr;
  const std::uint32_t* order = nullptr;  // the positions, sorted by id, and by position where ids are equal
  std::size_t count = 0;
};

// y = x / sqrt(mean(x^2) + epsilon) * weight, of rows as wide as the weight.
struct Norm {
  ConstView x{};
  ConstView weight{};
  float epsilon = 0;

  std::size_t width() const { return weight.count(); }
  std::size_t rows() const { return x.count() / weight.count(); }
};

// Causal attention with grouped queries: `heads / kv_heads` heads of queries share a head of keys and values. A row of queries has
// all heads of a position, next to each other; so has a row of keys and one of values.
struct Attention {
  std::size_t context = 0;  // positions of a sequence; sequences follow each other
  std::size_t heads = 0;
  std::size_t kv_heads = 0;
  std::size_t head_width = 0;
  ConstView query{}, key{}, value{};
  View output{};
  View sums{};  // the logarithm of the sum of each softmax, in fp32: [sequence][head][position]

  std::size_t sequences() const { return query.count() / (context * heads * head_width); }
};

// Views are fp32 or bf16, all of one call the same where nothing else is said, and sums are made in fp32. Gradients of parameters
// are added to those that are there; other results replace what was there. One thread uses it. On a GPU, calls return when their
// work is in the stream.
class Maths {
 public:
  virtual ~Maths() = default;
  virtual std::string library() const = 0;                 // what multiplies matrices
  virtual std::optional<int> gpu() const { return {}; }    // whose memory it works on; none: the host's
  virtual StreamHandle stream() const { return nullptr; }  // its stream on that GPU
  // Memory aligned to 256 bytes: its own, or the host's for many copies.
  virtual std::shared_ptr<std::byte> allocate(std::size_t bytes, bool on_host = false) = 0;
  virtual void copy(const ConstView& from, const View& to) = 0;  // each in any memory
  virtual void wait() {}                                         // until all calls are done

  virtual void multiply(const Product& product) = 0;

  virtual void embed(const Tokens& tokens, const ConstView& table, const View& to) = 0;
  virtual void embed_backward(const Tokens& tokens, const ConstView& gradient, const View& table_gradient) = 0;

  virtual void rms_norm(const Norm& norm, const View& to) = 0;
  // With `add`, the gradient of x is added to the one that is there.
  virtual void rms_norm_backward(const Norm& norm, const ConstView& gradient, const View& weight_gradient,
                                 const View& x_gradient, bool add) = 0;

  // Rotates in place each pair (i, i + head_width / 2) of each head, by the angle of its position. `angles` holds cosine and sine of
  // each pair, row by row, in fp32: a row for each position of a sequence. With `back`, by the opposite angle.
  virtual void rotate(const View& x, std::size_t head_width, const ConstView& angles, std::size_t row_width,
                      bool back) = 0;

  virtual void attention(const Attention& attention) = 0;  // makes the output and the sums, which backward reads
  virtual void attention_backward(const Attention& attention, const ConstView& gradient, const View& query_gradient,
                                  const View& key_gradient, const View& value_gradient) = 0;

  virtual void swiglu(const ConstView& gate, const ConstView& up, const View& to) = 0;  // gate sigmoid(gate) up
  // `gradient` is that of the result, and becomes that of the gate.
  virtual void swiglu_backward(const ConstView& gate, const ConstView& up, const View& gradient,
                               const View& up_gradient) = 0;

  // Rows of logits, in fp32. Writes each row's loss in fp32, and `scale` times the gradient of the logits.
  virtual void cross_entropy(const ConstView& logits, const std::uint32_t* targets, float scale, const View& losses,
                             const View& gradient) = 0;
};

// The bits of its results do not depend on the number of threads.
std::unique_ptr<Maths> cpu_maths(int threads);

// Has a stream of its own on the GPU of this number, modulo the GPUs of this machine. Throws B2101 in a build without CUDA or cuBLAS.
std::unique_ptr<Maths> gpu_maths(std::size_t number);

}  // namespace ballast::llama
