#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "examples/gpt/maths.h"
#include "examples/gpt/multiply.h"
#include "examples/gpt/rows.h"
#include "kernels/threads.h"

namespace ballast::gpt {
namespace {

using rows::ConstRow;
using rows::Row;
using Floats = std::vector<float>;

// The amounts that a thread takes at a time. They depend on shapes alone, and so do the bits.
constexpr std::size_t product_rows = 256;
constexpr std::size_t product_columns = 384;
constexpr std::size_t rows_at_once = 16;
constexpr std::size_t columns_at_once = 64;
constexpr std::size_t elements_at_once = 16 * 1024;

Floats read(const ConstView& from) {
  Floats to(from.count());
  rows::read(from, 0, to);
  return to;
}

// The queries of a block. Keys that no query of a block may see are skipped.
constexpr std::size_t queries_at_once = 128;

// Values of one format, in memory that every block reuses.
class Scratch {
 public:
  Scratch(std::size_t count, DType dtype) : bytes_(count * byte_size(dtype)), dtype_(dtype) {}
  Matrix matrix(std::size_t rows, std::size_t columns) {
    return {View(bytes_.data(), rows * columns, dtype_), rows, columns, columns};
  }

 private:
  std::vector<std::byte> bytes_;
  DType dtype_;
};

Row row_of(const Matrix& values, std::size_t row) {
  return values.memory.as<float>().subspan(row * values.stride, values.columns);
}

void write_row(ConstRow row, const Matrix& to, std::size_t number) { rows::write(row, to.memory, number * to.stride); }

// Causal attention of one head of one sequence, on one thread. It takes a block of queries at a time, with the keys up to that
// block's end.
class Attention {
 public:
  Attention(const Multiplier& multiply, const HeadOf<ConstMatrix>& head)
      : multiply_(multiply),
        head_(head),
        context_(head.key.rows),
        scale_(1.0f / std::sqrt(static_cast<float>(head.key.columns))),
        scores_(std::min(queries_at_once, context_) * context_, DType::fp32),
        weights_(std::min(queries_at_once, context_) * context_, head.key.dtype()) {}

  void forward(const Matrix& to) {
    for (std::size_t first = 0; first < context_; first += queries_at_once) {
      const std::size_t last = std::min(first + queries_at_once, context_);
      const Matrix scores = scores_.matrix(last - first, last);
      const Matrix weights = weigh(first, scores);
      multiply_({.a = readable(weights),
                 .b = head_.value.part(0, last, 0, width()),
                 .to = to.part(first, last - first, 0, width())});
    }
  }

  void backward(const ConstMatrix& gradient, const HeadOf<Matrix>& to) {
    Scratch slopes_memory(std::min(queries_at_once, context_) * context_, DType::fp32);
    Scratch keys_memory(context_ * width(), DType::fp32), values_memory(context_ * width(), DType::fp32);
    for (std::size_t first = 0; first < context_; first += queries_at_once) {
      const std::size_t last = std::min(first + queries_at_once, context_);
      const ConstMatrix block_gradient = gradient.part(first, last - first, 0, width());
      const Matrix scores = scores_.matrix(last - first, last);
      const Matrix slopes = slopes_memory.matrix(last - first, last);
      Matrix weights = weigh(first, scores);
      multiply_({.a = transposed(readable(weights)),
                 .b = block_gradient,
                 .to = values_memory.matrix(last, width()),
                 .add = true});
      multiply_({.a = block_gradient, .b = transposed(head_.value.part(0, last, 0, width())), .to = slopes});
      for (std::size_t row = 0; row < last - first; ++row) {
        rows::softmax_backward(row_of(scores, row), scale_, row_of(slopes, row));
        write_row(row_of(slopes, row), weights, row);
      }
      multiply_({.a = readable(weights),
                 .b = head_.key.part(0, last, 0, width()),
                 .to = to.query.part(first, last - first, 0, width())});
      multiply_({.a = transposed(readable(weights)),
                 .b = head_.query.part(first, last - first, 0, width()),
                 .to = keys_memory.matrix(last, width()),
                 .add = true});
    }
    for (std::size_t row = 0; row < context_; ++row) {
      write_row(row_of(keys_memory.matrix(context_, width()), row), to.key, row);
      write_row(row_of(values_memory.matrix(context_, width()), row), to.value, row);
    }
  }

 private:
  std::size_t width() const { return head_.key.columns; }

  // Returns the weight of each key's value for each query, zero for later keys. The scores become the same weights in
  // fp32.
  Matrix weigh(std::size_t first, const Matrix& scores) {
    multiply_({.a = head_.query.part(first, scores.rows, 0, width()),
               .b = transposed(head_.key.part(0, scores.columns, 0, width())),
               .to = scores});
    const Matrix weights = weights_.matrix(scores.rows, scores.columns);
    for (std::size_t row = 0; row < scores.rows; ++row) {
      const Row all = row_of(scores, row);
      rows::softmax(all.first(first + row + 1), scale_);
      std::ranges::fill(all.subspan(first + row + 1), 0.0f);
      write_row(all, weights, row);
    }
    return weights;
  }

  const Multiplier& multiply_;
  const HeadOf<ConstMatrix>& head_;
  std::size_t context_;
  float scale_;
  Scratch scores_;
  Scratch weights_;
};

class CpuMaths : public Maths {
 public:
  explicit CpuMaths(int threads) : threads_(threads) {}
  std::string library() const override { return multiplier_.library(); }
  MemoryKind memory() const override { return MemoryKind::pageable; }

  void multiply(const Product& product) override {
    const std::size_t across = (product.to.columns + product_columns - 1) / product_columns;
    const std::size_t down = (product.to.rows + product_rows - 1) / product_rows;
    threads_.each(down * across, [&](std::size_t part) {
      const std::size_t row = part / across * product_rows, column = part % across * product_columns;
      const std::size_t rows = std::min(product_rows, product.to.rows - row);
      const std::size_t columns = std::min(product_columns, product.to.columns - column);
      Product piece = product;
      piece.a = product.a.part(row, rows, 0, product.a.columns);
      piece.b = product.b.part(0, product.b.rows, column, columns);
      piece.to = product.to.part(row, rows, column, columns);
      if (product.bias.count() > 0) piece.bias = product.bias.part(column, columns);
      multiplier_(piece);
    });
  }

  void add_rows(const ConstMatrix& all, const View& into) override {
    by_parts(all.columns, columns_at_once, [&](std::size_t first, std::size_t last) {
      Floats sum(last - first), row(last - first);
      for (std::size_t i = 0; i < all.rows; ++i) {
        rows::read(all.memory, i * all.stride + first, row);
        rows::add(sum, row);
      }
      rows::add_to(into, first, sum);
    });
  }

  void clear(const View& to) override { std::memset(to.data(), 0, to.bytes()); }

  void copy(const ConstView& from, const View& to) override {
    by_parts(from.bytes(), elements_at_once, [&](std::size_t first, std::size_t last) {
      std::memcpy(to.data() + first, from.data() + first, last - first);
    });
  }

  void gelu(const ConstView& x, const View& to) override {
    by_parts(x.count(), elements_at_once, [&](std::size_t first, std::size_t last) {
      Floats values = read(x.part(first, last - first));
      rows::gelu(values, values);
      rows::write(values, to, first);
    });
  }

  void gelu_backward(const ConstView& x, const View& gradient) override {
    by_parts(x.count(), elements_at_once, [&](std::size_t first, std::size_t last) {
      Floats slopes = read(gradient.part(first, last - first));
      rows::gelu_backward(read(x.part(first, last - first)), slopes);
      rows::write(slopes, gradient, first);
    });
  }

  void layer_norm(const ConstView& x, const LayerNorm& norm, const View& to) override {
    const Floats weight = read(norm.weight), bias = read(norm.bias);
    const std::size_t width = weight.size();
    by_parts(x.count() / width, rows_at_once, [&](std::size_t first, std::size_t last) {
      Floats row(width);
      for (std::size_t i = first; i < last; ++i) {
        rows::read(x, i * width, row);
        rows::normalise({row, rows::moments(row), weight}, bias, row);
        rows::write(row, to, i * width);
      }
    });
  }

  void layer_norm_backward(const ConstView& x, const LayerNorm& norm, const ConstView& gradient,
                           const LayerNormGradients& into) override {
    const Floats weight = read(norm.weight);
    const std::size_t width = weight.size(), count = x.count() / width;
    const std::size_t parts = (count + rows_at_once - 1) / rows_at_once;
    std::vector<Floats> weight_gradients(parts, Floats(width)), bias_gradients(parts, Floats(width));
    by_parts(count, rows_at_once, [&](std::size_t first, std::size_t last) {
      const std::size_t part = first / rows_at_once;
      Floats row(width), slopes(width), sum(width);
      for (std::size_t i = first; i < last; ++i) {
        rows::read(x, i * width, row);
        rows::read(gradient, i * width, slopes);
        rows::read(into.input, i * width, sum);
        rows::normalise_backward({row, rows::moments(row), weight}, slopes, sum, weight_gradients[part]);
        rows::add(bias_gradients[part], slopes);
        rows::write(sum, into.input, i * width);
      }
    });
    add_all(weight_gradients, into.weight);
    add_all(bias_gradients, into.bias);
  }

  void attention(const AttentionShape& shape, const ConstView& qkv, const View& to) override {
    threads_.each(shape.batch * shape.heads, [&](std::size_t head) {
      const HeadOf<ConstMatrix> of = head_of(shape, qkv, head);
      Attention(multiplier_, of).forward(output_of_head(shape, to, head));
    });
  }

  void attention_backward(const AttentionShape& shape, const ConstView& qkv, const ConstView& gradient,
                          const View& qkv_gradient) override {
    threads_.each(shape.batch * shape.heads, [&](std::size_t head) {
      const HeadOf<ConstMatrix> of = head_of(shape, qkv, head);
      Attention(multiplier_, of).backward(output_of_head(shape, gradient, head), head_of(shape, qkv_gradient, head));
    });
  }

  void embed(const ConstView& bytes, const Tables<ConstView>& tables, const View& to) override {
    const auto tokens = bytes.as<std::uint8_t>();
    const std::size_t width = to.count() / tokens.size(), context = tables.positions.count() / width;
    by_parts(tokens.size(), rows_at_once, [&](std::size_t first, std::size_t last) {
      Floats row(width), position(width);
      for (std::size_t i = first; i < last; ++i) {
        rows::read(tables.tokens, tokens[i] * width, row);
        rows::read(tables.positions, i % context * width, position);
        rows::add(row, position);
        rows::write(row, to, i * width);
      }
    });
  }

  void embed_backward(const ConstView& bytes, const ConstView& gradient, const Tables<View>& into) override {
    const auto tokens = bytes.as<std::uint8_t>();
    const std::size_t width = gradient.count() / tokens.size(), context = into.positions.count() / width;
    const auto add = [&](const View& table, auto row_of) {
      const std::size_t count = table.count() / width;
      by_parts(width, columns_at_once, [&](std::size_t first, std::size_t last) {
        Floats sums(count * (last - first)), row(last - first);
        for (std::size_t i = 0; i < tokens.size(); ++i) {
          rows::read(gradient, i * width + first, row);
          rows::add(Row(sums).subspan(row_of(i) * row.size(), row.size()), row);
        }
        for (std::size_t i = 0; i < count; ++i) {
          rows::add_to(table, i * width + first, Row(sums).subspan(i * row.size(), row.size()));
        }
      });
    };
    add(into.tokens, [&](std::size_t i) { return std::size_t{tokens[i]}; });
    add(into.positions, [&](std::size_t i) { return i % context; });
  }

  void cross_entropy(const ConstView& logits, const Targets& targets) override {
    const auto bytes = targets.bytes.as<std::uint8_t>();
    const std::size_t width = logits.count() / bytes.size();
    const float share = 1.0f / static_cast<float>(bytes.size());
    by_parts(bytes.size(), rows_at_once, [&](std::size_t first, std::size_t last) {
      Floats row(width);
      for (std::size_t i = first; i < last; ++i) {
        rows::read(logits, i * width, row);
        targets.losses.as<float>()[i] = rows::cross_entropy(row, bytes[i], share);
        rows::write(row, targets.gradient, i * width);
      }
    });
  }

  void upload(std::span<const std::byte> from, const View& to) override {
    std::memcpy(to.data(), from.data(), from.size());
  }
  void download(const ConstView& from, std::span<std::byte> to) override {
    std::memcpy(to.data(), from.data(), to.size());
  }
  void finish() override {}

 private:
  template <class Body>
  void by_parts(std::size_t count, std::size_t at_once, const Body& body) const {
    threads_.each((count + at_once - 1) / at_once,
                  [&](std::size_t part) { body(part * at_once, std::min(count, (part + 1) * at_once)); });
  }

  static void add_all(const std::vector<Floats>& parts, const View& into) {
    Floats sum(into.count());
    for (const Floats& part : parts) {
      rows::add(sum, part);
    }
    rows::add_to(into, 0, sum);
  }

  kernels::Threads threads_;
  Multiplier multiplier_;
};

}  // namespace

std::unique_ptr<Maths> cpu_maths(int threads) { return std::make_unique<CpuMaths>(threads); }

}  // namespace ballast::gpt
