#include "examples/gpt/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "examples/gpt/noise.h"
#include "examples/gpt/number.h"
#include "kernels/threads.h"

namespace ballast::gpt {
namespace {

constexpr std::size_t decays = 0;
constexpr std::size_t stays = 1;

constexpr std::size_t values_at_once = 64 * 1024;  // initial values

Unit block_unit(const Shape& shape, std::size_t number) {
  const std::size_t width = shape.width;
  return {.name = fmt::format("h.{}", number),
          .dtype = shape.dtype,
          .tensors = {{"norm.weight", {width}, stays},
                      {"norm.bias", {width}, stays},
                      {"qkv.weight", {3 * width, width}, decays},
                      {"qkv.bias", {3 * width}, stays},
                      {"projection.weight", {width, width}, decays},
                      {"projection.bias", {width}, stays},
                      {"second_norm.weight", {width}, stays},
                      {"second_norm.bias", {width}, stays},
                      {"widen.weight", {4 * width, width}, decays},
                      {"widen.bias", {4 * width}, stays},
                      {"narrow.weight", {width, 4 * width}, decays},
                      {"narrow.bias", {width}, stays}}};
}

Unit head_unit(const Shape& shape) {
  Unit unit{.name = "head",
            .dtype = shape.dtype,
            .tensors = {{"norm.weight", {shape.width}, stays}, {"norm.bias", {shape.width}, stays}}};
  if (shape.tied) {
    unit.ties.push_back({.name = "weight", .unit = 0, .tensor = embedding::tokens});
  } else {
    unit.tensors.push_back({"weight", {Shape::vocabulary, shape.width}, decays});
  }
  return unit;
}

// The sum of twelve uniform 16-bit values is nearly normal.
float normal(std::uint64_t noise_of_element) {
  double sum = -6.0;
  for (std::uint64_t part = 0; part < 3; ++part) {
    const std::uint64_t bits = more_noise(noise_of_element, part);
    for (int shift = 0; shift < 64; shift += 16) {
      sum += static_cast<double>((bits >> shift) & 0xffff) / 65536.0;
    }
  }
  return static_cast<float>(sum);
}

void fill(const View& to, float value) {
  for (std::size_t i = 0; i < to.count(); ++i) {
    set_number(to, i, value);
  }
}

}  // namespace

void check(const Shape& shape) {
  require(shape.layers > 0 && shape.width > 0 && shape.heads > 0 && shape.context > 0, Code::bad_argument, [] {
    return Problem{.what = "cannot make a model without layers, width, heads or context", .needed = "at least 1"};
  });
  require(shape.width % shape.heads == 0, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot divide a width of {} among {} heads", shape.width, shape.heads),
                   .needed = "a multiple of the number of heads"};
  });
  require(shape.dtype == DType::bf16 || shape.dtype == DType::fp32, Code::wrong_dtype, [&] {
    return Problem{.what = fmt::format("cannot make a model in {}", name(shape.dtype)), .needed = "bf16 or fp32"};
  });
}

Model model_of(const Shape& shape) {
  Model model;
  model.units.push_back(
      {.name = "embedding",
       .dtype = shape.dtype,
       .tensors = {{"tokens", {Shape::vocabulary, shape.width}}, {"positions", {shape.context, shape.width}}}});
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    model.units.push_back(block_unit(shape, layer));
  }
  model.units.push_back(head_unit(shape));
  return model;
}

std::size_t parameters_of(const Model& model) {
  std::size_t count = 0;
  for (const Unit& unit : model.units) {
    for (const Tensor& tensor : unit.tensors) {
      count += tensor.elements();
    }
  }
  return count;
}

double operations_of_token(const Shape& shape) {
  const auto width = static_cast<double>(shape.width), context = static_cast<double>(shape.context);
  const double block = 12 * width * width + context * width;  // half of the attention, because it is causal
  const double head = Shape::vocabulary * width;
  return 6 * (static_cast<double>(shape.layers) * block + head);
}

// The products of a block except the last one, whose result is not needed.
double recomputed_operations_of_token(const Shape& shape) {
  const auto width = static_cast<double>(shape.width), context = static_cast<double>(shape.context);
  return 2 * static_cast<double>(shape.layers) * (8 * width * width + context * width);
}

ParameterSource initial_parameters(const Shape& shape, std::uint64_t seed, int threads) {
  const auto model = std::make_shared<Model>(model_of(shape));
  const auto workers = std::make_shared<kernels::Threads>(threads);
  const float deep = 1.0f / std::sqrt(2.0f * static_cast<float>(shape.layers));
  return [model, workers, seed, deep](std::size_t unit, std::size_t tensor, Range range, const View& to) {
    const Tensor& of = model->units[unit].tensors[tensor];
    if (of.shape.size() != 2) return fill(to, of.name.ends_with("norm.weight") ? 1.0f : 0.0f);
    const bool ends_in_stream = of.name == "projection.weight" || of.name == "narrow.weight";
    const float deviation = ends_in_stream ? 0.02f * deep : 0.02f;
    const std::uint64_t tensor_noise = noise({seed, unit * 100 + tensor});
    workers->each((range.count + values_at_once - 1) / values_at_once, [&](std::size_t part) {
      const std::size_t end = std::min(range.count, (part + 1) * values_at_once);
      for (std::size_t i = part * values_at_once; i < end; ++i) {
        set_number(to, i, deviation * normal(more_noise(tensor_noise, range.first + i)));
      }
    });
  };
}

}  // namespace ballast::gpt
