// Torch's operations on emulated GPUs. Tensors are made, viewed and copied here. Kernels of the CPU compute everything else, when
// the current stream reaches them (late_kernel.h). The few whose results only the values of the operands tell, such as the
// number of elements that are not zero, compute at once from copies of the operands.
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "tests/emulated_cuda/emulated.h"
#include "tests/emulated_cuda/torch/device.h"
#include "tests/emulated_cuda/torch/generator.h"
#include "tests/emulated_cuda/torch/late_kernel.h"
#include "tests/emulated_cuda/torch/memory.h"

namespace emulated_torch {
namespace {

constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

thread_local bool in_fallback = false;

int chosen_gpu(std::optional<c10::Device> device) {
  return device.has_value() && device->has_index() ? device->index() : current_gpu();
}

// --- Tensors and views ---

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool> pinned,
                 std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "only memory of the host can be pinned");
  const OnGpu on(chosen_gpu(device));
  return at::detail::empty_generic(sizes, &device_allocator(), keys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "only memory of the host can be pinned");
  const OnGpu on(chosen_gpu(device));
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(), keys, c10::dtype_or_default(type));
}

const at::Tensor& resize_tensor(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat>) {
  const auto elements = static_cast<std::size_t>(c10::multiply_integers(sizes) + self.storage_offset());
  const std::size_t needed = elements * self.dtype().itemsize();
  if (self.sizes() == sizes) return self;
  if (needed > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor& set_nothing(at::Tensor& self) {
  const at::Tensor nothing = at::empty({0}, self.options());
  return at::native::set_storage_cpu_(self, nothing.storage(), 0, {0}, {});
}

// --- Copies ---

void copy_on_gpu(const at::Tensor& from, const at::Tensor& to) {
  TORCH_CHECK(gpu_of(from) == gpu_of(to), "copies between two emulated GPUs are not emulated");
  launch(gpu_of(to), accesses_of({{from, false}, {to, true}}),
         [to = in_kernel(to), from = in_kernel(from)] { copy_in_kernel(to, from); });
}

// Copies an operand or a result of a kernel of the CPU.
void copy_in_fallback(const at::Tensor& from, const at::Tensor& to) {
  if (is_on_gpu(from)) {
    const at::Tensor source = in_kernel(from);
    launch_and_wait(gpu_of(from), accesses_of({{from, false}}), [&] { copy_in_kernel(to, source); });
  } else {
    launch(gpu_of(to), accesses_of({{to, true}}),
           [to = in_kernel(to), from = from.clone()] { copy_in_kernel(to, from); });
  }
}

// Copies as torch does on CUDA: what has gaps or another format is converted on its own side, and bytes are copied.
void copy_to_or_from_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::Tensor source = from.to(to.scalar_type()).contiguous();
  const at::Tensor target = to.is_contiguous() ? to : at::empty(to.sizes(), to.options());
  const int gpu = gpu_of(is_on_gpu(from) ? from : to);
  const OnGpu on(gpu);
  check(cudaMemcpyAsync(target.data_ptr(), source.data_ptr(), source.nbytes(), cudaMemcpyDefault, current_stream(gpu)),
        "cudaMemcpyAsync");
  if (!non_blocking) wait_for_stream(current_stream(gpu));
  if (!target.is_same(to)) to.copy_(target);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const at::Tensor from = self.expand_as(to);
  if (is_on_gpu(from) && is_on_gpu(to)) {
    copy_on_gpu(from, to);
  } else if (in_fallback) {
    copy_in_fallback(from, to);
  } else {
    copy_to_or_from_host(from, to, non_blocking);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  resize_tensor(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar value_of(const at::Tensor& self) {
  const at::Tensor on_host = at::empty({}, self.options().device(c10::kCPU).pinned_memory(true));
  copy_to_or_from_host(self.reshape({}), on_host, false);
  return at::native::_local_scalar_dense_cpu(on_host);
}

// --- Everything else ---

class InFallback {
 public:
  InFallback() : before_(std::exchange(in_fallback, true)) {}
  ~InFallback() { in_fallback = before_; }
  InFallback(const InFallback&) = delete;
  InFallback& operator=(const InFallback&) = delete;

 private:
  bool before_;
};

// The GPU that an operation works on: that of its first operand there, or the one that it names.
int gpu_of_call(const c10::ArrayRef<c10::IValue>& arguments) {
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor() && is_on_gpu(argument.toTensor())) return gpu_of(argument.toTensor());
    if (argument.isDevice()) return chosen_gpu(argument.toDevice());
  }
  return current_gpu();
}

// Draws from the GPU's generator.
void give_generators(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const std::size_t first = stack.size() - arguments.size();
  for (std::size_t index = 0; index < arguments.size(); ++index) {
    if (arguments[index].type()->str() != "Generator?") continue;
    c10::IValue& given = stack[first + index];
    given = drawn_from(given.isNone() ? default_generator(gpu_of_call(torch::jit::last(stack, arguments.size())))
                                      : given.toGenerator());
  }
}

void require_on_gpu(const c10::OperatorHandle& op, const c10::ArrayRef<c10::IValue>& arguments) {
  for (const c10::IValue& argument : arguments) {
    if (!argument.isTensor() || !argument.toTensor().defined()) continue;
    TORCH_CHECK(is_on_gpu(argument.toTensor()) || argument.toTensor().dim() == 0, op.schema().name(),
                ": expected all tensors on one GPU, and found one on ", argument.toTensor().device());
  }
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const OnGpu on(gpu_of_call(torch::jit::last(*stack, op.schema().arguments().size())));
  require_on_gpu(op, torch::jit::last(*stack, op.schema().arguments().size()));
  if (launch_late_kernel(op, *stack)) return;
  emulated::count("kernel that is not late");
  give_generators(op, *stack);
  const InFallback copies_are_kernels;
  at::native::cpu_fallback(op, stack, true);
}

void record_stream_of(at::Tensor& self, c10::Stream stream) { record_stream(self.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize_tensor);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, c10::IntArrayRef)>(&at::native::view));
  library.impl("view.dtype", &at::native::view_dtype);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("set_", &set_nothing);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &value_of);
  library.impl("record_stream", &record_stream_of);
}

}  // namespace
}  // namespace emulated_torch
