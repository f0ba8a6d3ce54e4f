// A trainer as a user would write one, small enough for tests: a chain of dense layers h' = tanh(W h + b) in fp32 on bf16
// parameters, with its backward pass.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/number_math.h"
#include "zero/engine.h"

namespace ballast::testing {

inline constexpr std::size_t width = 29;
inline constexpr std::size_t unit_count = 3;

inline Model tiny_model() {
  Model model;
  for (std::size_t unit = 0; unit < unit_count; ++unit) {
    model.units.push_back({.name = "h." + std::to_string(unit),
                           .tensors = {{"weight", {width, width}, 0}, {"nothing", {0}, 0}, {"bias", {width}, 1}}});
  }
  return model;
}

class TinyTrainer {
 public:
  TinyTrainer(const Layout& layout, std::size_t rank, std::size_t ranks)
      : layout_(layout), rank_(rank), ranks_(ranks) {}

  // Forward and backward of one micro-step; returns the loss.
  float run(Engine& engine, std::size_t step) {
    hidden_.assign(1, input(step));
    for (std::size_t unit = 0; unit < unit_count; ++unit) {
      forward(unit, engine.forward(unit));
    }
    std::vector<float> gradient(width);
    float loss = 0;
    for (std::size_t i = 0; i < width; ++i) {
      gradient[i] = hidden_.back()[i] - std::sin(static_cast<float>(i));
      loss += 0.5f * gradient[i] * gradient[i];
    }
    for (std::size_t unit = unit_count; unit-- > 0;) {
      gradient = backward(unit, engine.backward(unit), gradient);
    }
    return loss;
  }

 private:
  std::vector<float> input(std::size_t step) const {
    std::vector<float> values(width);
    for (std::size_t i = 0; i < width; ++i) {
      values[i] = std::cos(static_cast<float>(1 + i * (step * ranks_ + rank_ + 1)));
    }
    return values;
  }

  static float value(std::span<const bf16> parameters, std::size_t i) {
    return kernels::from_bf16(std::uint32_t{parameters[i].bits});
  }
  static void add(std::span<bf16> gradients, std::size_t i, float x) {
    const float sum = kernels::from_bf16(std::uint32_t{gradients[i].bits}) + x;
    gradients[i].bits = static_cast<std::uint16_t>(kernels::to_bf16(sum));
  }

  void forward(std::size_t unit, const Lease& lease) {
    const auto parameters = lease.parameters.as<bf16>();
    const auto& begin = layout_.units[unit].tensor_begin;
    const std::vector<float>& in = hidden_.back();
    std::vector<float> out(width);
    for (std::size_t i = 0; i < width; ++i) {
      float sum = value(parameters, begin[2] + i);
      for (std::size_t k = 0; k < width; ++k) {
        sum += value(parameters, begin[0] + i * width + k) * in[k];
      }
      out[i] = std::tanh(sum);
    }
    hidden_.push_back(std::move(out));
  }

  std::vector<float> backward(std::size_t unit, const Lease& lease, const std::vector<float>& gradient) {
    const auto parameters = lease.parameters.as<bf16>();
    const auto gradients = lease.gradients.as<bf16>();
    const auto& begin = layout_.units[unit].tensor_begin;
    const std::vector<float>& in = hidden_[unit];
    const std::vector<float>& out = hidden_[unit + 1];
    std::vector<float> before(width);
    for (std::size_t i = 0; i < width; ++i) {
      const float d = gradient[i] * (1 - out[i] * out[i]);
      add(gradients, begin[2] + i, d);
      for (std::size_t k = 0; k < width; ++k) {
        add(gradients, begin[0] + i * width + k, d * in[k]);
        before[k] += d * value(parameters, begin[0] + i * width + k);
      }
    }
    return before;
  }

  const Layout& layout_;
  std::size_t rank_;
  std::size_t ranks_;
  std::vector<std::vector<float>> hidden_;  // the input, then each unit's output
};

}  // namespace ballast::testing
