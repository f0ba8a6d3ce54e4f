"""Private parts of torch, each under a name that says what Ballast uses it for. No other file of the package uses them.

require_supported() says which versions of torch Ballast supports. tests/python/test_torch_compat.py checks each part, so that a
changed torch fails that test before it fails a training.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _len_torch_dispatch_stack
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

from ballast.checks import refuse

OLDEST = "2.9"


def require_supported(version: str) -> None:
    """Refuse a torch that lacks parts which this file names."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    if numbers < [int(number) for number in OLDEST.split(".")]:
        refuse(f"cannot train with torch {version}", needed=f"torch {OLDEST} or newer", remedy="pip install --upgrade torch")


require_supported(torch.__version__)

SavedTensorHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

# Operators that reach __torch_dispatch__, whose names begin with an underscore.
COPY_AS = torch.ops.aten._to_copy.default  # .to(), .cpu(), .float()
NORM_OF_EACH = torch.ops.aten._foreach_norm.Scalar
CLAMP_EACH_FROM_BELOW = torch.ops.aten._foreach_clamp_min_.Scalar
CLAMP_EACH_FROM_ABOVE = torch.ops.aten._foreach_clamp_max_.Scalar
MULTIPLY_EACH_BY_NUMBER = torch.ops.aten._foreach_mul_.Scalar
MULTIPLY_EACH_BY_TENSOR = torch.ops.aten._foreach_mul_.Tensor
UNSCALE_EACH = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


# --- Autograd ---


# Returns the hooks that pack and unpack the tensors that autograd saves now, such as those of activation checkpointing. Hooks
# that are pushed on top of them have to call them, and torch.autograd.graph.saved_tensors_hooks does not return them.
top_saved_tensor_hooks: Callable[[], SavedTensorHooks | None]
top_saved_tensor_hooks = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)

# Lets hooks pack and unpack the tensors that autograd saves, until they are popped. A module's forward hooks push them before
# its call and pop them after it, where there can be no `with` block.
push_saved_tensor_hooks: Callable[[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]], None]
push_saved_tensor_hooks = torch._C._autograd._push_saved_tensors_default_hooks

pop_saved_tensor_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks


NO_BACKWARD = -1

# Returns the number of the backward pass that runs on this thread, or NO_BACKWARD. One inside of another has its own number.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def is_in_backward() -> bool:
    return current_backward() != NO_BACKWARD


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs on this thread ends, in the streams of its caller. One that fails calls
    nothing."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def has_gradient_in_backward(parameter: torch.Tensor) -> bool:
    """Return whether the backward pass that runs on this thread computes a gradient of the parameter, or has done so."""
    with torch.enable_grad(), without_torch_function():
        accumulates = torch.autograd.graph.get_gradient_edge(parameter).node
    return bool(torch._C._will_engine_execute_node(accumulates))


def packs_for_checkpointing(pack: Callable[[torch.Tensor], Any]) -> bool:
    """Return whether this is the hook of activation checkpointing, which keeps nothing: backward computes it again."""
    return getattr(pack, "__module__", None) == "torch.utils.checkpoint"


def gradient_hooks_of(parameter: torch.Tensor) -> Mapping[int, Callable[[torch.Tensor], None]]:
    """Return the hooks that register_post_accumulate_grad_hook() has registered. Ballast finds the training of a
    parameter through its own hook."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


# --- torch.compile() ---


def _is_unknown() -> bool:
    return True


# Returns what compiles the Python functions that are called now; None if they run as they are.
compiler_of_calls: Callable[[], object] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", _is_unknown)


def has_compiled() -> bool:
    """Return whether torch.compile() has compiled any code of this process."""
    import torch._dynamo  # takes a second, which no program needs that does not train

    return bool(torch._dynamo.convert_frame.FRAME_COUNTER)


def call_before_compiling(function: Callable[[], object]) -> Callable[[], None]:
    """Call a function each time before torch.compile() compiles code. Return a function that ends this."""
    import torch._dynamo

    def call(_: object) -> None:
        function()

    torch._dynamo.callback_handler.register_start_callback(call)
    return partial(torch._dynamo.callback_handler.remove_start_callback, call)


def has_scripted() -> bool:
    """Return whether torch.jit has scripted any module of this process."""
    from torch.jit._recursive import concrete_type_store

    return bool(concrete_type_store.type_store)


def compiled_modules(model: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Return the modules that torch has compiled, each with the one that is called: itself, or the one of torch.compile()
    around it."""
    found = [(module, module) for module in model.modules() if module._compiled_call_impl is not None]
    around = [module for module in model.modules() if "_orig_mod" in module._modules]
    return found + [(each.get_submodule("_orig_mod"), each) for each in around]


def call_around(
    module: torch.nn.Module, before: Callable[[torch.nn.Module], None], after: Callable[[torch.nn.Module], None]
) -> Callable[[], None]:
    """Call functions before and after each call of a module that torch has compiled in place: its hooks are in the compiled
    code. Return the function that ends this."""
    compiled: Any = module._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        before(module)
        try:
            return compiled(*args, **kwargs)
        finally:
            after(module)

    def remove() -> None:
        if module._compiled_call_impl is call:
            module._compiled_call_impl = compiled

    module._compiled_call_impl = call
    return remove


# --- Tensors ---


def swap_tensors_in_place(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap the contents of two tensors, while each stays the same Python object, with its hooks. So a parameter can leave the
    meta device, and modules and optimizers keep it. torch.utils.swap_tensors() refuses tensors with weak references, which
    RNNs make."""
    hooks = [(each._backward_hooks, each._post_accumulate_grad_hooks) for each in (one, other)]
    torch._C._swap_tensor_impl(one, other)
    for each, of_each in zip((one, other), hooks, strict=True):
        each._backward_hooks, each._post_accumulate_grad_hooks = of_each


# Lets functions treat a subclass of Tensor as a plain tensor in the block, in which __torch_function__ calls them.
without_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass

# Does the same, and leaves out modes of functions too.
without_any_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction


def without_modes() -> AbstractContextManager[Any]:
    """Let operators run as they are in the block, whatever modes of the caller would change them."""
    has_modes = _len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch()
    return _disable_current_modes() if has_modes else nullcontext()  # the former imports modules, and fails at exit


def make_wrapper_tensor(
    kind: type[torch.Tensor],
    shape: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return a tensor of this class with a shape and no memory: every use of it reaches the class's
    __torch_dispatch__."""
    options = {} if strides is None else {"strides": tuple(strides)}
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(kind, tuple(shape), dtype=dtype, device=device, **options)
    return made


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that this one is a view of, or the tensor itself if it is no view."""
    base: torch.Tensor | None = tensor._base
    return tensor if base is None else base


def references_to(tensor: torch.Tensor) -> int:
    """Return how many places refer to the tensor, of which all of Python is one."""
    return int(tensor._use_count())


def storage_address(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies this storage as long as it lives, even without memory (on the meta device)."""
    return int(storage._cdata)


# Refers to a storage weakly. As long as the reference lives, no other storage has the address of this one.
WeakStorage = StorageWeakRef

# Returns how many tensors use the storage with this address. More than expected means that a view still exists.
users_of_storage: Callable[[int], int] = torch._C._storage_Use_Count


# Swaps the memory of two storages of the same size, under all tensors that use them; None in a torch before 2.13.
swap_memory: Callable[[torch.UntypedStorage, torch.UntypedStorage], None] | None
swap_memory = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same memory, which the caller keeps, and another storage."""
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, tensor.nbytes)
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())


def storage_of(weak: Any) -> torch.UntypedStorage | None:
    """Return the storage; None if nothing uses it any more."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return found


is_alias: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of


# Copies each of the values (second) into its place (first). On a GPU a few kernels copy all of them.
copy_each: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], object] = torch._foreach_copy_


# --- Operators ---


def arguments_of(operator: Any) -> Sequence[Any]:
    """Return the arguments of an operator's schema, which marks those that the operator writes to."""
    arguments: Sequence[Any] = operator._schema.arguments
    return arguments


def writes_to_arguments(operator: Any) -> bool:
    return bool(operator._schema.is_mutable)


# --- torch.distributed ---


def default_store() -> Any:
    """Return the store that init_process_group() has connected: ranks find each other through it, without a new
    port."""
    return torch.distributed.distributed_c10d._get_default_store()


def host_of_store(store: Any) -> str:
    """Return the host whose process serves a store over TCP; empty for other stores."""
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, torch.distributed.TCPStore) else ""


def is_dtensor(tensor: object) -> bool:
    known: Any = sys.modules.get("torch.distributed.tensor")  # no program has a DTensor without this module, which loads slowly
    return known is not None and isinstance(tensor, known.DTensor)


def scripted_in(model: torch.nn.Module) -> str | None:
    """Return the name of a module that torch.jit has scripted or traced, which has no hooks; None if there is none."""
    return next((name or "model" for name, each in model.named_modules() if isinstance(each, torch.jit.ScriptModule)), None)


def box_of_local_tensor(shape: torch.Size, mesh: Any, placements: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of this rank's local tensor of a DTensor, and where it begins in the full tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(sizes), tuple(offsets)


def active_data_parallel() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward is running on this thread: a model does not know its
    caller."""
    return DistributedDataParallel._get_active_ddp_module()


# --- Optimizers ---


def count_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning rate schedulers that the optimizer has made a step: they warn if they are called before a step."""
    optimizer._opt_called = True


def replaced_step(optimizer: torch.optim.Optimizer) -> Any:
    """Return the step() that a caller has put into the place of that of the optimizer's class; None if there is none. That of a
    learning rate scheduler does the same as the one of the class, and counts calls."""
    step, class_step = vars(optimizer).get("step"), type(optimizer).step
    does_the_same = class_step in (getattr(step, "__func__", None), getattr(step, "__wrapped__", None))
    return None if does_the_same else step


def leave_uncounted(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step() method, marked so that schedulers do not wrap it to count its calls: it calls count_step() itself."""
    marked: Any = step
    marked._wrapped_by_lr_sched = True
    return step
