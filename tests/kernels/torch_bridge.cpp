// The optimizer step for Python tests, through a C interface that ctypes can call. torch_bridge.py is its other half.
#include <ballast/optim.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/orthogonalize.h"
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

struct MuonOptions {
  double lr, momentum, weight_decay, eps;
  double ns_coefficients[3];
  int nesterov, ns_steps, match_rms_adamw, polar_express;
};

optim::Muon muon_of(const MuonOptions& o) {
  using namespace optim;
  return {
      .lr = o.lr,
      .momentum = o.momentum,
      .nesterov = o.nesterov != 0,
      .weight_decay = o.weight_decay,
      .ns_coefficients = {o.ns_coefficients[0], o.ns_coefficients[1], o.ns_coefficients[2]},
      .ns_steps = o.ns_steps,
      .eps = o.eps,
      .adjust_lr_fn = o.match_rms_adamw != 0 ? AdjustLr::match_rms_adamw : AdjustLr::original,
      .orthogonalization = o.polar_express != 0 ? Orthogonalization::polar_express : Orthogonalization::newton_schulz};
}

void orthogonalize(std::vector<bf16>& direction, const kernels::MatrixShape& shape, const kernels::NewtonSchulz& how) {
  const auto on = kernels::cpu_orthogonalizer();
  const std::size_t bytes = on->workspace_bytes(shape);
  const std::align_val_t alignment{kernels::workspace_alignment};
  const std::unique_ptr<std::byte, void (*)(std::byte*)> workspace(
      static_cast<std::byte*>(::operator new(bytes, alignment)),
      [](std::byte* memory) { ::operator delete (memory, std::align_val_t{kernels::workspace_alignment}); });
  (*on)(View(std::span(direction)), shape, how, {workspace.get(), bytes, DType::u8});
}

std::string last_error;

// Returns null, or the error's message.
template <class Call>
const char* error_of(const Call& call) {
  try {
    call();
    return nullptr;
  } catch (const std::exception& error) {
    last_error = error.what();
    return last_error.c_str();
  }
}

kernels::Backend& backend() {
  static const std::unique_ptr<kernels::Backend> cpu = kernels::cpu_backend();
  return *cpu;
}

}  // namespace

// Makes one step of a whole tensor on all cores. Returns null, or the error's message.
extern "C" const char* ballast_step(const Tensor* tensor, const Options* options, std::uint64_t unit,
                                    std::uint64_t number) {
  return error_of([&] {
    const optim::Rule rule = rule_of(*options);
    optim::check(rule);
    const kernels::GroupStep step = optim::at(rule, {.number = number});
    const kernels::Run run{.begin = 0, .count = tensor->count, .group = 0};
    backend().update(tile_of(*tensor, kernels::rounding_stream(0, unit, number)), {&run, 1}, {&step, 1});
  });
}

// The same by Muon, of a tensor of so many rows.
extern "C" const char* ballast_muon_step(const Tensor* tensor, const MuonOptions* options, std::uint64_t rows,
                                         std::uint64_t number) {
  return error_of([&] {
    const optim::Muon rule = muon_of(*options);
    rule.check();
    const kernels::MatrixShape shape{.rows = rows, .columns = tensor->count / rows};
    const kernels::Run run{.begin = 0, .count = tensor->count, .group = 0};
    std::vector<bf16> direction(tensor->count);
    TileMemory tile = tile_of(*tensor, kernels::rounding_stream(0, 0, number));
    TileMemory makes = tile;
    makes.parameter = reinterpret_cast<std::byte*>(direction.data());
    makes.parameter_dtype = DType::bf16;
    makes.master = nullptr;
    const kernels::GroupStep momentum = optim::at(rule, {.number = number});
    backend().update(makes, {&run, 1}, {&momentum, 1});
    orthogonalize(direction, shape, optim::orthogonalization_of(rule));
    tile.gradient = reinterpret_cast<const std::byte*>(direction.data());
    tile.gradient_dtype = DType::bf16;
    const kernels::GroupStep step = optim::step_of(rule, shape);
    backend().update(tile, {&run, 1}, {&step, 1});
  });
}
