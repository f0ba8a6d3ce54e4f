#include "examples/llama/model.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numbers>

#include "examples/llama/multiply.h"
#include "examples/llama/noise.h"

namespace ballast::llama {
namespace {

// The rotary settings of older and newer files: rope_scaling, or rope_parameters with the base.
void read_rope(const nlohmann::json& json, Config& config) {
  const nlohmann::json rope = json.value("rope_parameters", nlohmann::json::object());
  config.rope_base = rope.value("rope_theta", json.value("rope_theta", config.rope_base));
  nlohmann::json scaling = rope;
  if (const auto older = json.find("rope_scaling"); older != json.end() && older->is_object()) scaling = *older;
  const std::string type = scaling.value("rope_type", scaling.value("type", "default"));
  if (type == "default") return;
  require(type == "llama3", Code::unsupported, [&] {
    return Problem{.what = "cannot train a model with rotary embeddings of the type " + type,
                   .needed = "the type default or llama3"};
  });
  config.rope_scaling = {.factor = scaling.at("factor"),
                         .low_frequency_factor = scaling.at("low_freq_factor"),
                         .high_frequency_factor = scaling.at("high_freq_factor"),
                         .original_context = scaling.at("original_max_position_embeddings")};
}

Config parse(const nlohmann::json& json) {
  const std::string family = json.value("model_type", "llama");
  require(family == "llama" || family == "mistral" || family == "qwen2" || family == "qwen3", Code::unsupported, [&] {
    return Problem{.what = "cannot train a model of the family " + family, .needed = "llama, mistral, qwen2 or qwen3"};
  });
  Config config{.vocabulary = json.at("vocab_size"),
                .hidden = json.at("hidden_size"),
                .intermediate = json.at("intermediate_size"),
                .layers = json.at("num_hidden_layers"),
                .heads = json.at("num_attention_heads"),
                .epsilon = json.value("rms_norm_eps", 1e-6f),
                .tied = json.value("tie_word_embeddings", false),
                .has_biases = family == "qwen2" || json.value("attention_bias", false),
                .has_head_norms = family == "qwen3"};
  config.kv_heads = json.value("num_key_value_heads", config.heads);
  const auto width = json.find("head_dim");
  config.head_width =
      width != json.end() && width->is_number() ? width->get<std::size_t>() : config.hidden / config.heads;
  read_rope(json, config);
  const bool has_other_parts = json.value("mlp_bias", false) || (family != "qwen2" && config.has_biases);
  require(!has_other_parts && json.value("hidden_act", "silu") == "silu", Code::unsupported, [] {
    return Problem{.what = "cannot train this model: it has biases in other places than Qwen 2, or another activation",
                   .needed = "hidden_act silu, without attention_bias and mlp_bias"};
  });
  require(!json.value("use_sliding_window", false) || family == "mistral", Code::unsupported, [] {
    return Problem{.what = "cannot train a model with a sliding window", .needed = "attention to all positions"};
  });
  require(config.kv_heads > 0 && config.heads % config.kv_heads == 0 && config.head_width % 2 == 0, Code::bad_argument,
          [&] {
            return Problem{.what = "cannot divide " + std::to_string(config.heads) + " heads among " +
                                   std::to_string(config.kv_heads) + " heads of keys and values",
                           .needed = "a divisor, and heads of an even width"};
          });
  const std::string dtype = json.value("dtype", json.value("torch_dtype", "bfloat16"));
  config.dtype = dtype == "float32" ? DType::fp32 : DType::bf16;
  return config;
}

}  // namespace

Config read_config(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "config.json";
  std::ifstream file(path);
  const auto refuse = [&](const std::string& reason) {
    fail(Code::bad_argument, {.what = "cannot read the configuration of a model: " + reason,
                              .where = path.string(),
                              .needed = "config.json as transformers writes it"});
  };
  if (!file.good()) refuse("the file is missing or not readable");
  try {
    return parse(nlohmann::json::parse(file));
  } catch (const nlohmann::json::exception& error) {
    refuse(error.what());
    throw;
  }
}

std::vector<float> rope_angles(const Config& config, std::size_t context) {
  const std::size_t width = config.head_width, half = width / 2;
  std::vector<float> angles(context * width);
  for (std::size_t pair = 0; pair < half; ++pair) {
    double frequency = std::pow(config.rope_base, -2.0 * static_cast<double>(pair) / static_cast<double>(width));
    if (const auto& scaling = config.rope_scaling) {
      const double turns = scaling->original_context * frequency / (2.0 * std::numbers::pi);
      const double low = scaling->low_frequency_factor, high = scaling->high_frequency_factor;
      const double kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
      frequency *= kept + (1.0 - kept) / scaling->factor;
    }
    for (std::size_t position = 0; position < context; ++position) {
      const float angle = static_cast<float>(position) * static_cast<float>(frequency);  // in fp32, as torch does
      angles[position * width + pair] = std::cos(angle);
      angles[position * width + half + pair] = std::sin(angle);
    }
  }
  return angles;
}

Architecture::Architecture(const Config& c) {
  const std::size_t matrices = model.group("matrices"), vectors = model.group("vectors");
  const auto matrix = [&](const std::string& name, std::size_t rows, std::size_t columns) {
    return model.tensor({.name = name, .shape = {rows, columns}, .group = matrices});
  };
  const auto row = [&](const std::string& name, std::size_t width) {
    return model.tensor({.name = name, .shape = {width}, .group = vectors});
  };
  model.unit("model.embed_tokens", c.dtype);
  table = matrix("model.embed_tokens.weight", c.vocabulary, c.hidden);
  for (std::size_t i = 0; i < c.layers; ++i) {
    const std::string at = "model.layers." + std::to_string(i), attention = at + ".self_attn.", mlp = at + ".mlp.";
    const auto linear = [&](const std::string& name, std::size_t outputs, std::size_t inputs) {
      return Linear{.weight = matrix(name + ".weight", outputs, inputs), .inputs = inputs};
    };
    Layer layer{.unit = model.unit(at, c.dtype)};
    layer.norm = row(at + ".input_layernorm.weight", c.hidden);
    layer.q = linear(attention + "q_proj", c.query_width(), c.hidden);
    layer.k = linear(attention + "k_proj", c.kv_width(), c.hidden);
    layer.v = linear(attention + "v_proj", c.kv_width(), c.hidden);
    layer.o = linear(attention + "o_proj", c.hidden, c.query_width());
    if (c.has_biases) {
      layer.q.bias = row(attention + "q_proj.bias", c.query_width());
      layer.k.bias = row(attention + "k_proj.bias", c.kv_width());
      layer.v.bias = row(attention + "v_proj.bias", c.kv_width());
    }
    if (c.has_head_norms) {
      layer.q_norm = row(attention + "q_norm.weight", c.head_width);
      layer.k_norm = row(attention + "k_norm.weight", c.head_width);
    }
    layer.second_norm = row(at + ".post_attention_layernorm.weight", c.hidden);
    layer.gate = linear(mlp + "gate_proj", c.intermediate, c.hidden);
    layer.up = linear(mlp + "up_proj", c.intermediate, c.hidden);
    layer.down = linear(mlp + "down_proj", c.hidden, c.intermediate);
    layers.push_back(layer);
  }
  model.unit("model.norm", c.dtype);
  norm = row("model.norm.weight", c.hidden);
  head = {.weight = c.tied ? model.tied("lm_head.weight", table) : matrix("lm_head.weight", c.vocabulary, c.hidden),
          .inputs = c.hidden};
}

ParameterSource initial_values(const Model& model, std::uint64_t seed) {
  return [&model, seed](std::size_t unit, std::size_t number, Range range, const View& to) {
    const Tensor& tensor = model.units[unit].tensors[number];
    const std::uint64_t own = noise({seed, unit, number});
    std::vector<float> values(std::min<std::size_t>(range.count, 4096), tensor.name.ends_with("bias") ? 0.0f : 1.0f);
    for (std::size_t first = 0; first < range.count; first += values.size()) {
      values.resize(std::min(values.size(), range.count - first));
      for (std::size_t i = 0; i < values.size() && tensor.shape.size() == 2; ++i) {
        const std::uint64_t bits = noise({own, range.first + first + i});
        float sum = -2.0f;  // four uniform values make a nearly normal one
        for (int shift = 0; shift < 64; shift += 16)
          sum += static_cast<float>((bits >> shift) & 0xffff) * 0x1p-16f;
        values[i] = 0.02f * sum * std::numbers::sqrt3_v<float>;
      }
      rows::write(values, to, first);
    }
  };
}

std::size_t parameters_of(const Model& model) {
  std::size_t count = 0;
  for (const Unit& unit : model.units) {
    for (const Tensor& tensor : unit.tensors)
      count += tensor.elements();
  }
  return count;
}

}  // namespace ballast::llama
