// torch.autocast(): the casts of the operations that the tests use, as torch makes them on CUDA.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "tests/emulated_cuda/torch/device.h"

namespace emulated_torch {
namespace {

void call_with(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::ScalarType type) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  for (std::size_t index = stack->size() - op.schema().arguments().size(); index < stack->size(); ++index) {
    c10::IValue& argument = (*stack)[index];
    if (argument.isTensor()) argument = at::autocast::cached_cast(type, argument.toTensor(), device_type);
  }
  op.callBoxed(stack);
}

void in_lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call_with(op, stack, at::autocast::get_autocast_dtype(device_type));
}

void in_single_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) { call_with(op, stack, at::kFloat); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (const char* const name : {"linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "scaled_dot_product_attention"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_lower_precision>());
  }
  for (const char* const name : {"layer_norm", "mse_loss", "cross_entropy_loss", "nll_loss", "pow.Tensor_Scalar"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_single_precision>());
  }
}

}  // namespace
}  // namespace emulated_torch
