// Models of real sizes, as shapes.
#pragma once

#include <ballast/model.h>

namespace ballast::testing {

struct LlamaShape {
  std::size_t layers, width, hidden, key_value_width, words;
};

inline constexpr LlamaShape llama_3b{28, 3072, 8192, 1024, 128256};
inline constexpr LlamaShape llama_8b{32, 4096, 14336, 1024, 128256};
inline constexpr LlamaShape llama_70b{80, 8192, 28672, 1024, 128256};
inline constexpr LlamaShape qwen_14b{48, 5120, 13824, 1024, 152064};
inline constexpr LlamaShape qwen_32b{64, 5120, 27648, 1024, 152064};

inline Model llama(const LlamaShape& shape) {
  const auto [layers, width, hidden, key_value_width, words] = shape;
  Model model{{{.name = "embedding", .tensors = {{"weight", {words, width}}}}}};
  for (std::size_t i = 0; i < layers; ++i) {
    model.units.push_back({.name = "layers." + std::to_string(i),
                           .tensors = {{"q", {width, width}},
                                       {"k", {key_value_width, width}},
                                       {"v", {key_value_width, width}},
                                       {"o", {width, width}},
                                       {"gate", {hidden, width}},
                                       {"up", {hidden, width}},
                                       {"down", {width, hidden}},
                                       {"input_norm", {width}, 1},
                                       {"attention_norm", {width}, 1}}});
  }
  model.units.push_back({.name = "norm", .tensors = {{"weight", {width}, 1}}});
  model.units.push_back({.name = "head", .tensors = {{"weight", {words, width}}}});
  return model;
}

}  // namespace ballast::testing
