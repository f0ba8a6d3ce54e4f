// Small GPTs, trained on one rank or on threads as ranks.
#pragma once

#include "examples/gpt/gpt.h"
#include "tests/gpt/differences.h"
#include "zero/comm/thread_communicator.h"

namespace ballast::testing {

inline gpt::Shape tiny(DType dtype = DType::fp32) {
  return {.layers = 2, .width = 16, .heads = 2, .context = 12, .dtype = dtype};
}

inline std::vector<std::uint8_t> some_text(const gpt::Shape& shape, std::size_t batch) {
  std::vector<std::uint8_t> text(batch * (shape.context + 1));
  for (std::size_t i = 0; i < text.size(); ++i) {
    text[i] = static_cast<std::uint8_t>(gpt::noise({17, i}) % 11);
  }
  return text;
}

using Values = std::vector<std::vector<Floats>>;  // the values of each unit's tensors

// Returns values for all parameters that are not zero or one, so that each parameter matters.
inline Values some_values(const Model& model) {
  Values values;
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    values.emplace_back();
    for (const Tensor& tensor : model.units[unit].tensors) {
      values.back().push_back(random_floats(tensor.elements(), unit * 100 + values.back().size(), 0.4f));
      if (tensor.name.ends_with("norm.weight")) {
        for (float& number : values.back().back())
          number += 1.0f;
      }
    }
  }
  return values;
}

inline ParameterSource source_of(const Values& values) {
  return [&values](std::size_t unit, std::size_t tensor, Range range, const View& to) {
    const auto first = values[unit][tensor].begin() + std::ptrdiff_t(range.first);
    std::copy_n(first, range.count, to.as<float>().begin());
  };
}

}  // namespace ballast::testing
