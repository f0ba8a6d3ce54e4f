// The optimizer step for Python tests, through a C interface that ctypes can call. torch_bridge.py is its other half.
#include <ballast/optim.h>

#include <memory>
#include <string>

#include "kernels/backend.h"
#include "kernels/random_math.h"
#include "optim/step.h"

using namespace ballast;

namespace {

// The layout that torch_bridge.py declares.
struct Tensor {
  int format;
  int parameter_dtype;
  int gradient_dtype;
  std::byte* parameter;
  const std::byte* gradient;
  std::byte* master;
  std::byte* momentum;
  std::byte* variance;
  float* momentum_scales;
  float* variance_scales;
  std::uint64_t count;
};

struct Options {
  const char* rule;
  double lr, weight_decay, eps, beta1, beta2, lr_decay, momentum, dampening;
  int nesterov, maximize;
};

optim::Rule rule_of(const Options& o) {
  const std::string_view name = o.rule;
  const bool maximize = o.maximize != 0;
  if (name == "AdamW") {
    return optim::AdamW{.lr = o.lr,
                        .beta1 = o.beta1,
                        .beta2 = o.beta2,
                        .eps = o.eps,
                        .weight_decay = o.weight_decay,
                        .maximize = maximize};
  }
  if (name == "Adam") {
    return optim::Adam{.lr = o.lr,
                       .beta1 = o.beta1,
                       .beta2 = o.beta2,
                       .eps = o.eps,
                       .weight_decay = o.weight_decay,
                       .maximize = maximize};
  }
  if (name == "Adagrad") {
    return optim::Adagrad{
        .lr = o.lr, .lr_decay = o.lr_decay, .weight_decay = o.weight_decay, .eps = o.eps, .maximize = maximize};
  }
  if (name == "SGD" && o.momentum == 0.0) {
    return optim::Sgd{.lr = o.lr, .weight_decay = o.weight_decay, .maximize = maximize};
  }
  if (name == "SGD") {
    return optim::SgdMomentum{.lr = o.lr,
                              .momentum = o.momentum,
                              .dampening = o.dampening,
                              .weight_decay = o.weight_decay,
                              .nesterov = o.nesterov != 0,
                              .maximize = maximize};
  }
  throw std::invalid_argument("no rule is called " + std::string(name));
}

TileMemory tile_of(const Tensor& tensor, std::uint64_t rounding_stream) {
  return {.format = static_cast<StateFormat>(tensor.format),
          .parameter_dtype = static_cast<DType>(tensor.parameter_dtype),
          .gradient_dtype = static_cast<DType>(tensor.gradient_dtype),
          .parameter = tensor.parameter,
          .gradient = tensor.gradient,
          .master = tensor.master,
          .momentum = tensor.momentum,
          .variance = tensor.variance,
          .momentum_scales = tensor.momentum_scales,
          .variance_scales = tensor.variance_scales,
          .count = tensor.count,
          .rounding_stream = rounding_stream};
}

std::string last_error;

}  // namespace

// Makes one step of a whole tensor on all cores. Returns null, or the error's message.
extern "C" const char* ballast_step(const Tensor* tensor, const Options* options, std::uint64_t unit,
                                    std::uint64_t number) {
  static const std::unique_ptr<kernels::Backend> backend = kernels::cpu_backend();
  try {
    const optim::Rule rule = rule_of(*options);
    optim::check(rule);
    const kernels::GroupStep step = optim::at(rule, {.number = number});
    const kernels::Run run{.begin = 0, .count = tensor->count, .group = 0};
    backend->update(tile_of(*tensor, kernels::rounding_stream(0, unit, number)), {&run, 1}, {&step, 1});
    return nullptr;
  } catch (const std::exception& error) {
    last_error = error.what();
    return last_error.c_str();
  }
}
