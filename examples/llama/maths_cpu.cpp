// The arithmetic on CPUs: threads share rows and products, and formulas on a row are in fp32. Sums have one order, so every number of
// threads and every instruction set gives the same bits.
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "examples/llama/multiply.h"

// Compiles a function for several instruction sets. The best one that the processor has is called.
// ThreadSanitizer would instrument the code that chooses one, which the loader runs before the sanitizer begins.
#if defined(__SANITIZE_THREAD__) || !defined(__x86_64__)
#define BALLAST_FOR_EACH_ISA
#else
#define BALLAST_FOR_EACH_ISA [[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
#endif

// --- Formulas on a row of values ---

namespace ballast::llama::rows {
namespace {

// Sums have 16 lanes on every machine: as many as the widest vectors.
constexpr std::size_t lanes = 16;

template <class Term, class Join>
[[gnu::always_inline]] inline float reduce(std::size_t count, float begin, Term term, Join join) {
  std::array<float, lanes> lane;
  lane.fill(begin);
  const std::size_t whole = count / lanes * lanes;
  for (std::size_t i = 0; i < whole; i += lanes) {
    for (std::size_t j = 0; j < lanes; ++j)
      lane[j] = join(lane[j], term(i + j));
  }
  for (std::size_t i = whole; i < count; ++i)
    lane[i - whole] = join(lane[i - whole], term(i));
  for (std::size_t width = lanes / 2; width > 0; width /= 2) {
    for (std::size_t i = 0; i < width; ++i)
      lane[i] = join(lane[i], lane[i + width]);
  }
  return lane[0];
}

template <class Term>
[[gnu::always_inline]] inline float sum(std::size_t count, Term term) {
  return reduce(count, 0.0f, term, [](float a, float b) { return a + b; });
}

// Computes 2^n times a polynomial on +-ln(2)/2, to 2 ULP. Values that would overflow or vanish stay at the ends of the
// range. There are neither branches nor calls, so that loops over it are vectorised.
[[gnu::always_inline]] inline float exponential(float x) {
  constexpr float whole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
  const float above = x > -87.0f ? x : -87.0f;
  const float inside = above < 88.0f ? above : 88.0f;
  const float shifted = inside * 1.44269504f + whole;
  const float n = shifted - whole;
  const float r = (inside - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) + 127u) << 23);
}

[[gnu::always_inline]] inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

[[gnu::always_inline]] inline float widen(bf16 value) { return std::bit_cast<float>(std::uint32_t{value.bits} << 16); }

[[gnu::always_inline]] inline bf16 narrow(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<std::uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded)};
}

BALLAST_FOR_EACH_ISA void widen(const bf16* from, Row to) {
  for (std::size_t i = 0; i < to.size(); ++i)
    to[i] = widen(from[i]);
}

BALLAST_FOR_EACH_ISA void narrow(ConstRow from, bf16* to) {
  for (std::size_t i = 0; i < from.size(); ++i)
    to[i] = narrow(from[i]);
}

BALLAST_FOR_EACH_ISA void add_narrow(ConstRow more, bf16* to) {
  for (std::size_t i = 0; i < more.size(); ++i)
    to[i] = narrow(widen(to[i]) + more[i]);
}

BALLAST_FOR_EACH_ISA void add(Row to, ConstRow more) {
  for (std::size_t i = 0; i < to.size(); ++i)
    to[i] += more[i];
}

BALLAST_FOR_EACH_ISA float dot(ConstRow a, ConstRow b) {
  return sum(a.size(), [=](std::size_t i) { return a[i] * b[i]; });
}

BALLAST_FOR_EACH_ISA void scale_by(Row x, float factor, ConstRow weight) {
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = x[i] * factor * weight[i];
}

BALLAST_FOR_EACH_ISA void rms_norm_backward(ConstRow x, ConstRow weight, float factor, ConstRow gradient,
                                            Row weight_gradient, Row x_gradient) {
  const float along = sum(x.size(), [=](std::size_t i) { return gradient[i] * weight[i] * x[i]; });
  const float share = along * factor * factor / static_cast<float>(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    x_gradient[i] += factor * (gradient[i] * weight[i] - share * x[i]);
    weight_gradient[i] += gradient[i] * x[i] * factor;
  }
}

BALLAST_FOR_EACH_ISA void rotate(Row low, Row high, ConstRow cosines, ConstRow sines, float sign) {
  for (std::size_t i = 0; i < low.size(); ++i) {
    const float a = low[i], b = high[i], sine = sign * sines[i];
    low[i] = a * cosines[i] - b * sine;
    high[i] = b * cosines[i] + a * sine;
  }
}

BALLAST_FOR_EACH_ISA void swiglu(ConstRow gate, ConstRow up, Row to) {
  for (std::size_t i = 0; i < to.size(); ++i)
    to[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

BALLAST_FOR_EACH_ISA void swiglu_backward(ConstRow gate, ConstRow up, Row gradient, Row up_gradient) {
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const float open = sigmoid(gate[i]), slope = open + gate[i] * open * (1.0f - open);
    up_gradient[i] = gradient[i] * gate[i] * open;
    gradient[i] *= up[i] * slope;
  }
}

BALLAST_FOR_EACH_ISA void exponentiate(Row x, float scale, float offset) {
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = exponential(scale * x[i] - offset);
}

BALLAST_FOR_EACH_ISA float softmax(Row x, float scale) {
  const auto larger = [](float a, float b) { return a > b ? a : b; };
  const float most = scale * reduce(
                                 x.size(), x[0], [=](std::size_t i) { return x[i]; }, larger);
  exponentiate(x, scale, most);
  const float total = sum(x.size(), [=](std::size_t i) { return x[i]; }), factor = 1.0f / total;
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] *= factor;
  return most + std::log(total);
}

BALLAST_FOR_EACH_ISA void softmax_backward(ConstRow softmax, float scale, float along, Row gradient) {
  for (std::size_t i = 0; i < gradient.size(); ++i)
    gradient[i] = scale * softmax[i] * (gradient[i] - along);
}

}  // namespace

void read(const ConstView& from, std::size_t first, Row to) {
  if (from.dtype() == DType::fp32) {
    std::copy_n(from.as<float>().data() + first, to.size(), to.data());
  } else {
    widen(from.as<bf16>().data() + first, to);
  }
}

void write(ConstRow from, const View& to, std::size_t first) {
  if (to.dtype() == DType::fp32) {
    std::copy_n(from.data(), from.size(), to.as<float>().data() + first);
  } else {
    narrow(from, to.as<bf16>().data() + first);
  }
}

void add_to(const View& to, std::size_t first, ConstRow more) {
  if (to.dtype() == DType::fp32) {
    add(to.as<float>().subspan(first, more.size()), more);
  } else {
    add_narrow(more, to.as<bf16>().data() + first);
  }
}

}  // namespace ballast::llama::rows

// --- Layers ---

namespace ballast::llama {
namespace {

using rows::ConstRow;
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

Floats read_row(const ConstMatrix& m, std::size_t row) { return read(m.memory, row * m.stride, m.columns); }

Matrix matrix(Floats& values, std::size_t rows, std::size_t columns) {
  return {View(std::span(values)).part(0, rows * columns), columns};
}

Row row_of(const Matrix& m, std::size_t row) { return m.memory.as<float>().subspan(row * m.stride, m.columns); }

// Causal attention of the query heads that share a head of keys and values, in one sequence, on one thread. It takes a block of
// queries at a time, with the keys up to that block's end.
class GroupAttention {
 public:
  GroupAttention(const Attention& of, std::size_t number)
      : of_(of),
        number_(number),
        scale_(1.0f / std::sqrt(static_cast<float>(of.head_width))),
        scores_(std::min(queries_at_once, of.context) * of.context) {}

  void forward() {
    each_block([&](const Block& block) {
      const Matrix scores = score(block);
      for (std::size_t row = 0; row < block.count; ++row) {
        const Row all = row_of(scores, row);
        sums_of(block)[row] = rows::softmax(all.first(block.first + row + 1), scale_);
        std::ranges::fill(all.subspan(block.first + row + 1), 0.0f);
      }
      multiply_on_this_thread(
          {.a = as_factor(scores, weights_), .b = seen(of_.value, block), .to = of(of_.output, block)});
    });
  }

  void backward(const ConstView& of_output, const View& of_query, const View& of_key, const View& of_value) {
    Floats slopes_memory(scores_.size()), keys(of_.context * of_.head_width), values(keys.size());
    each_block([&](const Block& block) {
      const ConstMatrix gradient = of(of_output, block), output = of(ConstView(of_.output), block);
      const Matrix scores = score(block), slopes = matrix(slopes_memory, scores.rows, scores.columns);
      multiply_on_this_thread({.a = gradient, .b = seen(of_.value, block).transpose(), .to = slopes});
      for (std::size_t row = 0; row < block.count; ++row) {
        const Row softmax = row_of(scores, row), slope = row_of(slopes, row);
        const std::size_t causal = block.first + row + 1;
        rows::exponentiate(softmax.first(causal), scale_, sums_of(block)[row]);
        const float along = rows::dot(read_row(gradient, row), read_row(output, row));
        rows::softmax_backward(softmax.first(causal), scale_, along, slope.first(causal));
        std::ranges::fill(softmax.subspan(causal), 0.0f);
        std::ranges::fill(slope.subspan(causal), 0.0f);
      }
      const ConstMatrix weights = as_factor(scores, weights_), of_scores = as_factor(slopes, slopes_);
      const auto to = [&](Floats& sum) { return matrix(sum, scores.columns, of_.head_width); };
      multiply_on_this_thread({.a = weights.transpose(), .b = gradient, .to = to(values), .add = true});
      multiply_on_this_thread({.a = of_scores, .b = seen(of_.key, block), .to = of(of_query, block)});
      multiply_on_this_thread({.a = of_scores.transpose(), .b = of(of_.query, block), .to = to(keys), .add = true});
    });
    write(keys, shared(of_key));
    write(values, shared(of_value));
  }

 private:
  // Queries of a head.
  struct Block {
    std::size_t head, first, count;
  };

  template <class Body>
  void each_block(const Body& body) const {
    const std::size_t group = of_.heads / of_.kv_heads, begin = number_ % of_.kv_heads * group;
    for (std::size_t head = begin; head < begin + group; ++head) {
      for (std::size_t first = 0; first < of_.context; first += queries_at_once)
        body({head, first, std::min(queries_at_once, of_.context - first)});
    }
  }

  // The rows of one of all heads in the sequence.
  template <class AnyView>
  BasicMatrix<AnyView> head(const AnyView& all, std::size_t heads, std::size_t head) const {
    return BasicMatrix<AnyView>(all, heads * of_.head_width)
        .part(number_ / of_.kv_heads * of_.context, of_.context, head * of_.head_width, of_.head_width);
  }
  template <class AnyView>
  BasicMatrix<AnyView> of(const AnyView& queries, const Block& block) const {
    return head(queries, of_.heads, block.head).part(block.first, block.count, 0, of_.head_width);
  }
  template <class AnyView>
  BasicMatrix<AnyView> shared(const AnyView& keys) const {
    return head(keys, of_.kv_heads, number_ % of_.kv_heads);
  }
  ConstMatrix seen(const ConstView& keys, const Block& block) const {
    return shared(keys).part(0, block.first + block.count, 0, of_.head_width);
  }
  Row sums_of(const Block& block) const {
    const std::size_t row = number_ / of_.kv_heads * of_.heads + block.head;
    return of_.sums.as<float>().subspan(row * of_.context + block.first);
  }

  Matrix score(const Block& block) {
    const Matrix scores = matrix(scores_, block.count, block.first + block.count);
    multiply_on_this_thread({.a = of(of_.query, block), .b = seen(of_.key, block).transpose(), .to = scores});
    return scores;
  }

  // The values in the format of the other factor.
  ConstMatrix as_factor(const Matrix& values, std::vector<bf16>& narrowed) const {
    if (of_.query.dtype() == DType::fp32) return values;
    narrowed.resize(values.memory.count());
    const View to((std::span(narrowed)));
    rows::write(values.memory.as<float>(), to, 0);
    return ConstMatrix(ConstView(to), values.columns);
  }

  static void write(const Floats& from, const Matrix& to) {
    for (std::size_t row = 0; row < to.rows; ++row)
      rows::write(ConstRow(from).subspan(row * to.columns, to.columns), to.memory, row * to.stride);
  }

  const Attention& of_;
  std::size_t number_;  // of the sequence and its head of keys and values
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
  void copy(const ConstView& from, const View& to) override { std::memcpy(to.data(), from.data(), from.bytes()); }

  void multiply(const Product& product) override {
    const std::size_t down = parts_of(product.to.rows, product_rows);
    const std::size_t across = parts_of(product.to.columns, product_columns), depth = product.a.columns;
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

  void embed(const Tokens& tokens, const ConstView& table, const View& to) override {
    const std::size_t width = to.count() / tokens.count;
    for (std::size_t i = 0; i < tokens.count; ++i)
      copy(table.part(tokens.ids[i] * width, width), to.part(i * width, width));
  }

  void embed_backward(const Tokens& tokens, const ConstView& gradient, const View& table_gradient) override {
    const std::size_t width = gradient.count() / tokens.count;
    const auto id = [&](std::size_t place) { return tokens.ids[tokens.order[place]]; };
    each_row(tokens.count, [&](std::size_t place) {
      if (place > 0 && id(place) == id(place - 1)) return;  // the sum is made where equal ids begin
      Floats sum(width);
      for (std::size_t next = place; next < tokens.count && id(next) == id(place); ++next)
        rows::add(sum, read(gradient, tokens.order[next] * width, width));
      rows::add_to(table_gradient, id(place) * width, sum);
    });
  }

  void rms_norm(const Norm& norm, const View& to) override {
    const Floats weights = read(norm.weight);
    each_row(norm.rows(), [&](std::size_t i) {
      Floats row = read(norm.x, i * norm.width(), norm.width());
      rows::scale_by(row, factor_of(row, norm), weights);
      rows::write(row, to, i * norm.width());
    });
  }

  void rms_norm_backward(const Norm& norm, const ConstView& gradient, const View& weight_gradient,
                         const View& x_gradient, bool add) override {
    const std::size_t width = norm.width();
    const Floats weights = read(norm.weight);
    std::vector<Floats> sums(parts_of(norm.rows(), rows_at_once), Floats(width));  // of each part
    each_row(norm.rows(), [&](std::size_t i) {
      const Floats x = read(norm.x, i * width, width), slopes = read(gradient, i * width, width);
      Floats into = add ? read(x_gradient, i * width, width) : Floats(width);
      rows::rms_norm_backward(x, weights, factor_of(x, norm), slopes, sums[i / rows_at_once], into);
      rows::write(into, x_gradient, i * width);
    });
    for (std::size_t part = 1; part < sums.size(); ++part)
      rows::add(sums[0], sums[part]);
    rows::add_to(weight_gradient, 0, sums[0]);
  }

  void rotate(const View& x, std::size_t head_width, const ConstView& angles, std::size_t row_width,
              bool back) override {
    const std::size_t half = head_width / 2, positions = angles.count() / head_width;
    each_row(x.count() / row_width, [&](std::size_t i) {
      Floats row = read(x, i * row_width, row_width);
      const auto angle = angles.as<float>().subspan(i % positions * head_width, head_width);
      for (std::size_t at = 0; at < row_width; at += head_width) {
        rows::rotate(Row(row).subspan(at, half), Row(row).subspan(at + half, half), angle.first(half), angle.last(half),
                     back ? -1.0f : 1.0f);
      }
      rows::write(row, x, i * row_width);
    });
  }

  void attention(const Attention& of) override {
    each(of.sequences() * of.kv_heads, [&](std::size_t group) { GroupAttention(of, group).forward(); });
  }

  void attention_backward(const Attention& of, const ConstView& gradient, const View& query_gradient,
                          const View& key_gradient, const View& value_gradient) override {
    each(of.sequences() * of.kv_heads, [&](std::size_t group) {
      GroupAttention(of, group).backward(gradient, query_gradient, key_gradient, value_gradient);
    });
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
    const std::size_t width = logits.count() / losses.count();
    const Floats ones(width, 1.0f);
    each_row(losses.count(), [&](std::size_t i) {
      Floats row = read(logits, i * width, width);
      const float logit = row[targets[i]];
      losses.as<float>()[i] = rows::softmax(row, 1.0f) - logit;
      row[targets[i]] -= 1.0f;
      rows::scale_by(row, scale, ones);
      rows::write(row, gradient, i * width);
    });
  }

 private:
  static float factor_of(ConstRow x, const Norm& norm) {
    return 1.0f / std::sqrt(rows::dot(x, x) / static_cast<float>(x.size()) + norm.epsilon);
  }

  static std::size_t parts_of(std::size_t count, std::size_t at_once) { return (count + at_once - 1) / at_once; }

  template <class Body>
  void each(std::size_t count, const Body& body) {
    arena_.execute([&] { oneapi::tbb::parallel_for(std::size_t{0}, count, body); });
  }

  template <class Body>
  void by_parts(std::size_t count, std::size_t at_once, const Body& body) {
    each(parts_of(count, at_once),
         [&](std::size_t part) { body(part * at_once, std::min(count, (part + 1) * at_once)); });
  }

  // One thread takes the rows of a part, in order.
  template <class Body>
  void each_row(std::size_t count, const Body& body) {
    by_parts(count, rows_at_once, [&](std::size_t first, std::size_t last) {
      for (std::size_t row = first; row < last; ++row)
        body(row);
    });
  }

  oneapi::tbb::task_arena arena_;
};

}  // namespace

std::unique_ptr<Maths> cpu_maths(int threads) { return std::make_unique<CpuMaths>(threads); }

}  // namespace ballast::llama
