#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "examples/llama/maths.h"
#include "examples/llama/multiply.h"
#include "examples/llama/rows.h"

namespace ballast::llama {
namespace {

using rows::Row;
using Floats = std::vector<float>;

// The amounts that a thread takes at a time. They depend on shapes alone, and so do the bits.
constexpr std::size_t product_rows = 256;
constexpr std::size_t product_columns = 384;
constexpr std::size_t queries_at_once = 128;
constexpr std::size_t rows_at_once = 16;
constexpr std::size_t elements_at_once = 16 * 1024;

Floats read(const ConstView& from, std::size_t first, std::size_t count) {
  Floats to(count);
  rows::read(from, first, to);
  return to;
}
Floats read(const ConstView& from) { return read(from, 0, from.count()); }

Matrix matrix(Floats& values, std::size_t rows, std::size_t columns) {
  return {View(std::span(values)).part(0, rows * columns), columns};
}

Row row_of(const Matrix& m, std::size_t row) { return m.memory.as<float>().subspan(row * m.stride, m.columns); }

// Causal attention of the query heads that share a head of keys and values, in one sequence, on one thread. It takes a block of
// queries at a time, with the keys up to that block's end.
class GroupAttention {
 public:
  GroupAttention(const AttentionShape& shape, const Attended<ConstView>& from, std::size_t number)
      : shape_(shape),
        sequence_(number / shape.kv_heads),
        group_(shape.heads / shape.kv_heads),
        kv_head_(number % shape.kv_heads),
        query_(from.query),
        key_(head(from.key, shape.kv_heads, kv_head_)),
        value_(head(from.value, shape.kv_heads, kv_head_)),
        scale_(1.0f / std::sqrt(static_cast<float>(shape.head_width))),
        scores_(std::min(queries_at_once, shape.context) * shape.context) {}

  void forward(const View& to, std::span<float> sums) {
    each_block([&](std::size_t query_head, std::size_t first, std::size_t count) {
      const Matrix scores = score(query_head, first, count);
      const std::span<float> sums_here = sums_of(sums, query_head, first);
      for (std::size_t row = 0; row < count; ++row) {
        const Row all = row_of(scores, row);
        sums_here[row] = rows::softmax(all.first(first + row + 1), scale_);
        std::ranges::fill(all.subspan(first + row + 1), 0.0f);
      }
      multiply_on_this_thread({.a = as_factor(scores, weights_),
                               .b = value_.part(0, first + count, 0, shape_.head_width),
                               .to = head(to, shape_.heads, query_head).part(first, count, 0, shape_.head_width)});
    });
  }

  void backward(const Maths::AttentionGradient& known, const Attended<View>& to) {
    const std::size_t width = shape_.head_width;
    Floats slopes_memory(scores_.size()), keys(shape_.context * width), values(shape_.context * width);
    each_block([&](std::size_t query_head, std::size_t first, std::size_t count) {
      const std::size_t seen = first + count;
      const auto part = [&](const auto& view) {
        return head(view, shape_.heads, query_head).part(first, count, 0, width);
      };
      const ConstMatrix gradient = part(known.gradient), output = part(known.output);
      const Matrix scores = score(query_head, first, count), slopes = matrix(slopes_memory, count, seen);
      multiply_on_this_thread({.a = gradient, .b = value_.part(0, seen, 0, width).transpose(), .to = slopes});
      const std::span<const float> sums = sums_of(known.sums.as<float>(), query_head, first);
      for (std::size_t row = 0; row < count; ++row) {
        const Row softmax = row_of(scores, row), slope = row_of(slopes, row);
        const std::size_t causal = first + row + 1;
        rows::exponentiate(softmax.first(causal), scale_, sums[row]);
        const float along = rows::dot(read(gradient.memory, row * gradient.stride, width),
                                      read(output.memory, row * output.stride, width));
        rows::softmax_backward(softmax.first(causal), scale_, along, slope.first(causal));
        std::ranges::fill(softmax.subspan(causal), 0.0f);
        std::ranges::fill(slope.subspan(causal), 0.0f);
      }
      const ConstMatrix weights = as_factor(scores, weights_), of_scores = as_factor(slopes, slopes_);
      multiply_on_this_thread(
          {.a = weights.transpose(), .b = gradient, .to = matrix(values, seen, width), .add = true});
      multiply_on_this_thread({.a = of_scores, .b = key_.part(0, seen, 0, width), .to = part(to.query)});
      multiply_on_this_thread(
          {.a = of_scores.transpose(), .b = part(query_), .to = matrix(keys, seen, width), .add = true});
    });
    write(keys, head(to.key, shape_.kv_heads, kv_head_));
    write(values, head(to.value, shape_.kv_heads, kv_head_));
  }

 private:
  template <class AnyView>
  BasicMatrix<AnyView> head(const AnyView& all, std::size_t heads, std::size_t number) const {
    return BasicMatrix<AnyView>(all, heads * shape_.head_width)
        .part(sequence_ * shape_.context, shape_.context, number * shape_.head_width, shape_.head_width);
  }

  template <class Float>
  std::span<Float> sums_of(std::span<Float> all, std::size_t query_head, std::size_t first) const {
    return all.subspan((sequence_ * shape_.heads + query_head) * shape_.context + first);
  }

  template <class Body>
  void each_block(const Body& body) const {
    for (std::size_t query_head = kv_head_ * group_; query_head < (kv_head_ + 1) * group_; ++query_head) {
      for (std::size_t first = 0; first < shape_.context; first += queries_at_once)
        body(query_head, first, std::min(queries_at_once, shape_.context - first));
    }
  }

  Matrix score(std::size_t query_head, std::size_t first, std::size_t count) {
    const Matrix scores = matrix(scores_, count, first + count);
    multiply_on_this_thread({.a = head(query_, shape_.heads, query_head).part(first, count, 0, shape_.head_width),
                             .b = key_.part(0, first + count, 0, shape_.head_width).transpose(),
                             .to = scores});
    return scores;
  }

  // The values in the format of the other factor.
  ConstMatrix as_factor(const Matrix& values, std::vector<bf16>& narrowed) const {
    if (query_.dtype() == DType::fp32) return values;
    narrowed.resize(values.memory.count());
    const View to((std::span(narrowed)));
    rows::write(values.memory.as<float>(), to, 0);
    return ConstMatrix(ConstView(to), values.columns);
  }

  static void write(const Floats& from, const Matrix& to) {
    for (std::size_t row = 0; row < to.rows; ++row)
      rows::write(rows::ConstRow(from).subspan(row * to.columns, to.columns), to.memory, row * to.stride);
  }

  AttentionShape shape_;
  std::size_t sequence_, group_, kv_head_;
  ConstView query_;
  ConstMatrix key_, value_;
  float scale_;
  Floats scores_;
  std::vector<bf16> weights_{}, slopes_{};
};

class CpuMaths : public Maths {
 public:
  explicit CpuMaths(int threads) : arena_(threads) {}

  std::string library() const override { return multiplier_name(); }

  std::shared_ptr<std::byte> allocate(std::size_t bytes, bool /*on_host*/) override {
    constexpr std::align_val_t alignment{256};
    return {static_cast<std::byte*>(::operator new(std::max<std::size_t>(bytes, 1), alignment)),
            [](std::byte* memory) { ::operator delete(memory, alignment); }};
  }
  void upload(const void* from, void* to, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void download(const void* from, void* to, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void clear(const View& to) override { std::memset(to.data(), 0, to.bytes()); }
  void copy(const ConstView& from, const View& to) override { std::memcpy(to.data(), from.data(), from.bytes()); }

  void multiply(const Product& product) override {
    const std::size_t down = (product.to.rows + product_rows - 1) / product_rows;
    const std::size_t across = (product.to.columns + product_columns - 1) / product_columns, depth = product.a.columns;
    each(down * across, [&](std::size_t piece) {
      const std::size_t row = piece / across * product_rows, column = piece % across * product_columns;
      const std::size_t rows = std::min(product_rows, product.to.rows - row);
      const std::size_t columns = std::min(product_columns, product.to.columns - column);
      multiply_on_this_thread({.a = product.a.part(row, rows, 0, depth),
                               .b = product.b.part(0, depth, column, columns),
                               .to = product.to.part(row, rows, column, columns),
                               .add = product.add});
    });
  }

  void add_bias(const ConstView& bias, const View& to) override {
    const Floats values = read(bias);
    by_parts(to.count() / values.size(), rows_at_once, [&](std::size_t first, std::size_t last) {
      for (std::size_t i = first; i < last; ++i)
        rows::add_to(to, i * values.size(), values);
    });
  }

  void add_rows(const ConstView& from, const View& gradient) override {
    const std::size_t width = gradient.count();
    sum_parts(from.count() / width, gradient,
              [&](std::size_t row, Row sum) { rows::add(sum, read(from, row * width, width)); });
  }

  void embed(const Tokens& tokens, const ConstView& table, const View& to) override {
    const std::size_t width = to.count() / tokens.count;
    for (std::size_t i = 0; i < tokens.count; ++i)
      copy(table.part(tokens.ids[i] * width, width), to.part(i * width, width));
  }

  void embed_backward(const Tokens& tokens, const ConstView& gradient, const View& table_gradient) override {
    const std::size_t width = gradient.count() / tokens.count;
    const auto id = [&](std::size_t place) { return tokens.ids[tokens.order[place]]; };
    by_parts(tokens.count, rows_at_once, [&](std::size_t first, std::size_t last) {
      for (std::size_t place = first; place < last; ++place) {
        if (place > 0 && id(place) == id(place - 1)) continue;  // the sum is made where equal ids begin
        Floats sum(width);
        for (std::size_t next = place; next < tokens.count && id(next) == id(place); ++next)
          rows::add(sum, read(gradient, tokens.order[next] * width, width));
        rows::add_to(table_gradient, id(place) * width, sum);
      }
    });
  }

  void rms_norm(const ConstView& x, const ConstView& weight, float epsilon, const View& to) override {
    const Floats weights = read(weight);
    const std::size_t width = weights.size();
    by_parts(x.count() / width, rows_at_once, [&](std::size_t first, std::size_t last) {
      for (std::size_t i = first; i < last; ++i) {
        Floats row = read(x, i * width, width);
        rows::scale_by(row, norm_factor(row, epsilon), weights);
        rows::write(row, to, i * width);
      }
    });
  }

  void rms_norm_backward(const ConstView& x, const ConstView& weight, float epsilon, const ConstView& gradient,
                         const View& weight_gradient, const View& x_gradient) override {
    const Floats weights = read(weight);
    const std::size_t width = weights.size();
    sum_parts(x.count() / width, weight_gradient, [&](std::size_t row, Row sum) {
      const Floats values = read(x, row * width, width), slopes = read(gradient, row * width, width);
      Floats into = read(x_gradient, row * width, width);
      rows::rms_norm_backward(values, weights, norm_factor(values, epsilon), slopes, sum, into);
      rows::write(into, x_gradient, row * width);
    });
  }

  void rotate(const View& x, std::size_t head_width, const ConstView& angles, std::size_t row_width,
              bool back) override {
    const std::size_t half = head_width / 2, positions = angles.count() / head_width;
    by_parts(x.count() / row_width, rows_at_once, [&](std::size_t first, std::size_t last) {
      for (std::size_t i = first; i < last; ++i) {
        Floats row = read(x, i * row_width, row_width);
        const auto angle = angles.as<float>().subspan(i % positions * head_width, head_width);
        for (std::size_t at = 0; at < row_width; at += head_width) {
          rows::rotate(Row(row).subspan(at, half), Row(row).subspan(at + half, half), angle.first(half),
                       angle.last(half), back ? -1.0f : 1.0f);
        }
        rows::write(row, x, i * row_width);
      }
    });
  }

  void attention(const AttentionShape& shape, const Attended<ConstView>& from, const View& to,
                 const View& sums) override {
    each(groups(shape, from),
         [&](std::size_t group) { GroupAttention(shape, from, group).forward(to, sums.as<float>()); });
  }

  void attention_backward(const AttentionShape& shape, const Attended<ConstView>& from, const AttentionGradient& known,
                          const Attended<View>& gradients) override {
    each(groups(shape, from),
         [&](std::size_t group) { GroupAttention(shape, from, group).backward(known, gradients); });
  }

  void swiglu(const ConstView& gate, const ConstView& up, const View& to) override {
    by_parts(to.count(), elements_at_once, [&](std::size_t first, std::size_t last) {
      Floats values = read(gate, first, last - first);
      rows::swiglu(values, read(up, first, last - first), values);
      rows::write(values, to, first);
    });
  }

  void swiglu_backward(const ConstView& gate, const ConstView& up, const View& gradient,
                       const View& up_gradient) override {
    by_parts(gradient.count(), elements_at_once, [&](std::size_t first, std::size_t last) {
      const std::size_t count = last - first;
      Floats slopes = read(gradient, first, count), of_up(count);
      rows::swiglu_backward(read(gate, first, count), read(up, first, count), slopes, of_up);
      rows::write(slopes, gradient, first);
      rows::write(of_up, up_gradient, first);
    });
  }

  void cross_entropy(const ConstView& logits, const std::uint32_t* targets, float scale, const View& losses,
                     const View& gradient) override {
    const std::size_t count = losses.count(), width = logits.count() / count;
    by_parts(count, rows_at_once, [&](std::size_t first, std::size_t last) {
      const Floats scales(width, 1.0f);
      for (std::size_t i = first; i < last; ++i) {
        Floats row = read(logits, i * width, width);
        const float logit = row[targets[i]];
        losses.as<float>()[i] = rows::softmax(row, 1.0f) - logit;
        row[targets[i]] -= 1.0f;
        rows::scale_by(row, scale, scales);
        rows::write(row, gradient, i * width);
      }
    });
  }

 private:
  static std::size_t groups(const AttentionShape& shape, const Attended<ConstView>& from) {
    return from.key.count() / (shape.context * shape.head_width);
  }

  static float norm_factor(rows::ConstRow x, float epsilon) {
    return 1.0f / std::sqrt(rows::dot(x, x) / static_cast<float>(x.size()) + epsilon);
  }

  template <class Body>
  void each(std::size_t count, const Body& body) {
    arena_.execute([&] { oneapi::tbb::parallel_for(std::size_t{0}, count, body); });
  }

  template <class Body>
  void by_parts(std::size_t count, std::size_t at_once, const Body& body) {
    each((count + at_once - 1) / at_once,
         [&](std::size_t part) { body(part * at_once, std::min(count, (part + 1) * at_once)); });
  }

  // Calls body(row, sum) for each row; rows of a part share a sum, and the parts are added in their order.
  template <class Body>
  void sum_parts(std::size_t count, const View& into, const Body& body) {
    std::vector<Floats> sums((count + rows_at_once - 1) / rows_at_once, Floats(into.count()));
    by_parts(count, rows_at_once, [&](std::size_t first, std::size_t last) {
      for (std::size_t row = first; row < last; ++row)
        body(row, sums[first / rows_at_once]);
    });
    for (std::size_t part = 1; part < sums.size(); ++part)
      rows::add(sums[0], sums[part]);
    rows::add_to(into, 0, sums[0]);
  }

  oneapi::tbb::task_arena arena_;
};

}  // namespace

std::unique_ptr<Maths> cpu_maths(int threads) { return std::make_unique<CpuMaths>(threads); }

}  // namespace ballast::llama
