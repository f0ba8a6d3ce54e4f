#include "tests/emulated_cuda/torch/late_kernel.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "tests/emulated_cuda/emulated.h"
#include "tests/emulated_cuda/rules.h"
#include "tests/emulated_cuda/torch/device.h"

namespace emulated_torch {
namespace {

using torch::jit::Stack;

// Applies a function to each tensor in a value.
template <class Change>
c10::IValue changed(const c10::IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(change(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList().vec()) {
      list.push_back(tensor.has_value() && tensor->defined() ? std::optional(change(*tensor)) : tensor);
    }
    return list;
  }
  return value;
}

template <class Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  changed(value, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// The place of the argument that a result is, or -1 for a new tensor.
int argument_of(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (result.alias_info() == nullptr) return -1;
  for (std::size_t index = 0; index < schema.arguments().size(); ++index) {
    const c10::AliasInfo* const alias = schema.arguments()[index].alias_info();
    if (alias != nullptr && alias->beforeSets() == result.alias_info()->beforeSets()) return static_cast<int>(index);
  }
  return -1;
}

// A tensor without memory, for the shapes of results. Numbers stay on the host.
at::Tensor shape_of(const at::Tensor& tensor) {
  if (!is_on_gpu(tensor)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
}

c10::IValue without_memory(const c10::IValue& value) {
  if (value.isDevice()) return c10::Device(c10::kMeta);
  return changed(value, shape_of);
}

at::Tensor of_shape(const at::Tensor& shape, int gpu) {
  const c10::Device device(device_type, static_cast<c10::DeviceIndex>(gpu));
  return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device));
}

// An operand where the kernel finds it. One of the host is a number that CUDA would pass to the kernel.
at::Tensor operand_in_kernel(const at::Tensor& tensor) {
  if (is_on_gpu(tensor)) return in_kernel(tensor);
  at::Tensor copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

c10::IValue value_in_kernel(const c10::IValue& value) {
  if (value.isDevice()) return c10::Device(c10::kCPU);
  return changed(value, operand_in_kernel);
}

// Returns whether each result is a new tensor or an argument that the operation writes.
bool has_plain_results(const c10::FunctionSchema& schema) {
  return std::ranges::all_of(schema.returns(), [&](const c10::Argument& result) {
    if (result.type()->kind() != c10::TypeKind::TensorType && result.type()->str() != "Tensor[]") return false;
    return result.alias_info() == nullptr || (is_written(result) && argument_of(schema, result) >= 0);
  });
}

bool draws(const c10::FunctionSchema& schema) {
  return std::ranges::any_of(schema.arguments(),
                             [](const c10::Argument& argument) { return argument.type()->str() == "Generator?"; }) ||
         schema.name().find("dropout") != std::string::npos;
}

// Returns the results without memory. Empty: they are not known before the kernel has computed.
Stack shapes_of_results(const c10::OperatorHandle& op, const Stack& arguments) {
  Stack shapes;
  std::ranges::transform(arguments, std::back_inserter(shapes), without_memory);
  try {
    op.callBoxed(shapes);
  } catch (const std::exception&) {  // the kernel of the CPU reports what is wrong with the operands
    return {};
  }
  return shapes;
}

// Returns the results in the memory of the GPU.
Stack results_of(const c10::FunctionSchema& schema, const Stack& arguments, const Stack& shapes, int gpu) {
  Stack results;
  for (std::size_t index = 0; index < shapes.size(); ++index) {
    const int argument = argument_of(schema, schema.returns()[index]);
    if (argument < 0) {
      results.push_back(changed(shapes[index], [gpu](const at::Tensor& shape) { return of_shape(shape, gpu); }));
      continue;
    }
    results.push_back(arguments[static_cast<std::size_t>(argument)]);
    if (shapes[index].isTensor()) results.back().toTensor().resize_(shapes[index].toTensor().sizes());
  }
  return results;
}

std::vector<emulated::Access> accesses_of_call(const c10::FunctionSchema& schema, const Stack& arguments,
                                               const Stack& results) {
  std::vector<Operand> operands;
  for (std::size_t index = 0; index < arguments.size(); ++index) {
    const bool writes = is_written(schema.arguments()[index]);
    each_tensor(arguments[index], [&](const at::Tensor& tensor) { operands.push_back({tensor, writes}); });
  }
  for (const c10::IValue& result : results) {
    each_tensor(result, [&](const at::Tensor& tensor) { operands.push_back({tensor, true}); });
  }
  return accesses_of(operands);
}

void compute(const c10::OperatorHandle& op, const Stack& arguments, const Stack& results) {
  const at::AutoDispatchBelowADInplaceOrView plainly;
  Stack computed = arguments;
  try {
    op.callBoxed(computed);
  } catch (const std::exception& error) {
    emulated::broken("kernels of torch succeed", op.schema().name() + ": " + error.what());
  }
  for (std::size_t index = 0; index < results.size(); ++index) {
    if (argument_of(op.schema(), op.schema().returns()[index]) >= 0) continue;
    std::vector<at::Tensor> from;
    each_tensor(computed[index], [&](const at::Tensor& tensor) { from.push_back(tensor); });
    std::size_t next = 0;
    each_tensor(results[index], [&](const at::Tensor& to) { copy_in_kernel(to, from.at(next++)); });
  }
}

}  // namespace

int gpu_of(const at::Tensor& tensor) { return tensor.device().index(); }
bool is_on_gpu(const at::Tensor& tensor) { return tensor.device().type() == device_type; }

at::Tensor in_kernel(const at::Tensor& tensor) {
  return at::from_blob(emulated::in_work(tensor.data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(c10::kCPU));
}

void copy_in_kernel(at::Tensor to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView plainly;
  to.copy_(from);
}

std::vector<emulated::Access> accesses_of(const std::vector<Operand>& operands) {
  std::vector<emulated::Access> accesses;
  for (const auto& [tensor, is_written] : operands) {
    if (!is_on_gpu(tensor) || tensor.numel() == 0) continue;
    std::vector<std::pair<std::int64_t, std::int64_t>> dimensions;  // strides and sizes, from the innermost
    for (std::int64_t i = 0; i < tensor.dim(); ++i) {
      if (tensor.size(i) > 1 && tensor.stride(i) != 0) dimensions.emplace_back(tensor.stride(i), tensor.size(i));
    }
    std::ranges::sort(dimensions);
    std::int64_t run = 1;  // elements that lie side by side
    auto next = dimensions.begin();
    for (; next != dimensions.end() && next->first == run; ++next) {
      run *= next->second;
    }
    std::vector<std::int64_t> firsts{0};
    for (; next != dimensions.end(); ++next) {
      const std::size_t count = firsts.size();
      for (std::int64_t i = 1; i < next->second; ++i) {
        for (std::size_t each = 0; each < count; ++each) {
          firsts.push_back(firsts[each] + i * next->first);
        }
      }
    }
    const auto width = static_cast<std::int64_t>(tensor.itemsize());
    for (const std::int64_t first : firsts) {
      accesses.push_back({static_cast<const std::byte*>(tensor.data_ptr()) + first * width,
                          static_cast<std::size_t>(run * width), is_written});
    }
  }
  return accesses;
}

bool launch_late_kernel(const c10::OperatorHandle& op, Stack& stack) {
  const c10::FunctionSchema& schema = op.schema();
  if (!has_plain_results(schema) || draws(schema)) return false;
  const std::size_t count = schema.arguments().size();
  const Stack arguments(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
  const Stack shapes = shapes_of_results(op, arguments);
  if (shapes.size() != schema.returns().size()) return false;
  const int gpu = current_gpu();
  const Stack results = results_of(schema, arguments, shapes, gpu);
  Stack in_kernel_arguments, in_kernel_results;
  std::ranges::transform(arguments, std::back_inserter(in_kernel_arguments), value_in_kernel);
  std::ranges::transform(results, std::back_inserter(in_kernel_results), value_in_kernel);
  launch(gpu, accesses_of_call(schema, arguments, results),
         [op, arguments = std::move(in_kernel_arguments), results = std::move(in_kernel_results)] {
           compute(op, arguments, results);
         });
  torch::jit::drop(stack, count);
  stack.insert(stack.end(), results.begin(), results.end());
  return true;
}

}  // namespace emulated_torch
