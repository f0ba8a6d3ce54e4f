// Kernels of the CPU that compute when a stream reaches them, in the memory of the GPU: they read their operands then, as late as
// kernels of CUDA do.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

#include "tests/emulated_cuda/memory_order.h"

namespace emulated_torch {

int gpu_of(const at::Tensor& tensor);
bool is_on_gpu(const at::Tensor& tensor);

at::Tensor in_kernel(
    const at::Tensor& tensor);  // the memory of a GPU as a tensor of the host, which a kernel can access
void copy_in_kernel(at::Tensor to, const at::Tensor& from);

struct Operand {
  at::Tensor tensor;
  bool is_written = false;
};
std::vector<emulated::Access> accesses_of(
    const std::vector<Operand>& operands);  // nothing for those that are not on a GPU

// Launches the operation in the current stream, and leaves its results on the stack. Returns false, and changes nothing, if
// the results cannot be known before the kernel has computed, or it draws random numbers.
bool launch_late_kernel(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace emulated_torch
