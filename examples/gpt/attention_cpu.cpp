#include "examples/gpt/attention_cpu.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "examples/gpt/rows.h"

namespace ballast::gpt {
namespace {

constexpr std::size_t block = 128;  // queries; keys that no query of a block may see are skipped

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

rows::Row row_of(const Matrix& values, std::size_t row) {
  return values.memory.as<float>().subspan(row * values.stride, values.columns);
}

void write_row(rows::ConstRow row, const Matrix& to, std::size_t number) {
  rows::write(row, to.memory, number * to.stride);
}

class Attention {
 public:
  Attention(const Multiplier& multiply, const HeadOf<ConstMatrix>& head)
      : multiply_(multiply),
        head_(head),
        context_(head.key.rows),
        scale_(1.0f / std::sqrt(static_cast<float>(head.key.columns))),
        scores_(std::min(block, context_) * context_, DType::fp32),
        weights_(std::min(block, context_) * context_, head.key.dtype()) {}

  void forward(const Matrix& to) {
    for (std::size_t first = 0; first < context_; first += block) {
      const std::size_t last = std::min(first + block, context_);
      const Matrix scores = scores_.matrix(last - first, last);
      const Matrix weights = weigh(first, scores);
      multiply_({.a = readable(weights),
                 .b = head_.value.part(0, last, 0, width()),
                 .to = to.part(first, last - first, 0, width())});
    }
  }

  void backward(const ConstMatrix& gradient, const HeadOf<Matrix>& to) {
    Scratch slopes_memory(std::min(block, context_) * context_, DType::fp32);
    Scratch keys_memory(context_ * width(), DType::fp32), values_memory(context_ * width(), DType::fp32);
    for (std::size_t first = 0; first < context_; first += block) {
      const std::size_t last = std::min(first + block, context_);
      const ConstMatrix of_block = gradient.part(first, last - first, 0, width());
      const Matrix scores = scores_.matrix(last - first, last);
      const Matrix slopes = slopes_memory.matrix(last - first, last);
      Matrix weights = weigh(first, scores);
      multiply_(
          {.a = transposed(readable(weights)), .b = of_block, .to = values_memory.matrix(last, width()), .add = true});
      multiply_({.a = of_block, .b = transposed(head_.value.part(0, last, 0, width())), .to = slopes});
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
      const rows::Row all = row_of(scores, row);
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

}  // namespace

void attend(const Multiplier& multiply, const HeadOf<ConstMatrix>& head, const Matrix& to) {
  Attention(multiply, head).forward(to);
}

void attend_backward(const Multiplier& multiply, const HeadOf<ConstMatrix>& head, const ConstMatrix& gradient,
                     const HeadOf<Matrix>& to) {
  Attention(multiply, head).backward(gradient, to);
}

}  // namespace ballast::gpt
