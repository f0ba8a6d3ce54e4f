"""Tests that each private part of torch that the package uses does what the package needs."""

import gc
import subprocess
import sys
import weakref

import ballast
import pytest

torch = pytest.importorskip("torch")

from ballast import _torch_compat as compat  # noqa: E402 (needs torch)


def test_an_older_torch_is_refused():
    for version in ("2.9.0", "2.10.1+cpu", "3.0.0a0+git123"):
        compat.require_supported(version)
    with pytest.raises(ballast.UsageError, match="B1001 cannot train with torch 2.6.0\\+debian") as raised:
        compat.require_supported("2.6.0+debian")
    assert raised.value.needed == "torch 2.9 or newer"


def test_a_backward_pass_is_known_in_its_recomputations_and_hooks():
    from torch.utils.checkpoint import checkpoint

    found = []

    def observe(x):
        found.append(compat.is_in_backward())
        return x.exp()

    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda gradient: found.append(compat.is_in_backward()))
    checkpoint(observe, x, use_reentrant=False).sum().backward()
    assert found == [False, True, True]  # forward, the recomputation, and the hook


def test_a_function_is_called_when_a_backward_pass_ends():
    called = []

    def ask(gradient):
        compat.call_after_backward(lambda: called.append(weight.grad is not None))
        if gradient.sum() < 0:
            raise FloatingPointError

    weight = torch.nn.Parameter(torch.ones(2))
    weight.register_hook(ask)
    weight.sum().backward()
    assert called == [True]
    with pytest.raises(FloatingPointError):
        (-weight).sum().backward()
    assert called == [True]


@pytest.fixture
def no_hooks():
    assert compat.top_saved_tensor_hooks() is None
    yield
    assert compat.top_saved_tensor_hooks() is None


def test_pushed_hooks_pack_and_unpack_what_autograd_saves(no_hooks):
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor)
        return len(packed) - 1

    def unpack(number):
        unpacked.append(number)
        return packed[number]

    weight = torch.ones(3, requires_grad=True)
    compat.push_saved_tensor_hooks(pack, unpack)
    try:
        loss = (weight * weight).sum()
    finally:
        compat.pop_saved_tensor_hooks()
    loss.backward()
    assert len(packed) == len(unpacked) == 2
    assert torch.equal(weight.grad, torch.full((3,), 2.0))


def test_the_hooks_on_top_are_those_that_were_pushed_last(no_hooks):
    hooks = (lambda tensor: tensor, lambda saved: saved)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        assert compat.top_saved_tensor_hooks() == hooks
        compat.push_saved_tensor_hooks(str, hooks[1])
        assert compat.top_saved_tensor_hooks() == (str, hooks[1])
        compat.pop_saved_tensor_hooks()
        assert compat.top_saved_tensor_hooks() == hooks


def test_a_thread_knows_whether_it_runs_a_backward_pass():
    seen = []
    weight = torch.nn.Parameter(torch.ones(2))
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(compat.is_in_backward()))
    weight.sum().backward()
    assert (seen, compat.is_in_backward()) == ([True], False)


def test_a_backward_pass_knows_which_parameters_get_gradients():
    used, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    seen = []

    def look(_):
        seen.append((compat.current_backward(), compat.has_gradient_in_backward(used), compat.has_gradient_in_backward(other)))

    inner = used * 2
    inner.register_hook(look)
    for _ in range(2):
        inner.sum().backward(retain_graph=True)
    (one, *first), (two, *second) = seen
    assert first == second == [True, False]
    assert one != two and compat.NO_BACKWARD not in (one, two)
    assert compat.current_backward() == compat.NO_BACKWARD


def test_gradient_hooks_of_a_parameter_are_found():
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not compat.gradient_hooks_of(parameter)
    handle = parameter.register_post_accumulate_grad_hook(print)
    assert [*compat.gradient_hooks_of(parameter).values()] == [print]
    handle.remove()
    assert not compat.gradient_hooks_of(parameter)


def test_a_parameter_that_has_weak_references_leaves_the_meta_device_and_stays_the_same_object():
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    parameter.mark = "kept"
    known = weakref.ref(parameter)
    called = []
    handle = parameter.register_hook(lambda gradient: called.append("before"))
    parameter.register_post_accumulate_grad_hook(lambda each: called.append("after"))
    compat.swap_tensors_in_place(parameter, torch.nn.Parameter(torch.ones(3)))
    assert known() is parameter and parameter.mark == "kept"
    assert torch.equal(parameter, torch.ones(3)) and parameter.requires_grad
    parameter.sum().backward()
    assert torch.equal(parameter.grad, torch.ones(3)) and called == ["before", "after"]
    handle.remove()
    parameter.sum().backward()
    assert called == ["before", "after", "after"]


def test_the_memory_of_a_storage_is_swapped_under_the_views_of_it():
    memory = torch.arange(6.0)
    tensor = compat.with_own_storage(memory.view(2, 3).t())
    assert torch.equal(tensor, memory.view(2, 3).t()) and tensor.data_ptr() == memory.data_ptr()
    weak, view = compat.WeakStorage(tensor.untyped_storage()), tensor[1:]
    del tensor
    storage = compat.storage_of(weak)
    compat.swap_memory(storage, storage.clone())
    memory.zero_()
    assert torch.equal(view, torch.tensor([[1.0, 4.0], [2.0, 5.0]]))
    del view, storage
    assert compat.storage_of(weak) is None


class Counted(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls += 1
        with compat.without_torch_function():
            return func(*args, **(kwargs or {}))


def test_a_subclass_is_a_plain_tensor_where_its_torch_function_is_off():
    tensor = torch.ones(2).as_subclass(Counted)
    before = Counted.calls
    doubled = tensor * 2
    assert Counted.calls == before + 1
    assert type(doubled) is torch.Tensor


class Empty(torch.Tensor):
    used = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.used.append(func)
        return args[0]


def test_modes_do_not_reach_into_their_exceptions():
    class Seen(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class IsCpu(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return "replaced" if func == torch.Tensor.is_cpu.__get__ else func(*args, **(kwargs or {}))

    seen = []
    with Seen():
        with compat.without_modes():
            tensor = torch.ones(2)
        assert seen == []
        torch.ones(2)
        assert len(seen) == 1
    with IsCpu():
        assert tensor.is_cpu == "replaced"
        with compat.without_any_torch_function():
            assert tensor.is_cpu is True


def test_a_wrapper_tensor_has_a_shape_and_every_use_of_it_is_dispatched():
    made = compat.make_wrapper_tensor(Empty, (3, 2), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert type(made) is Empty and made.shape == (3, 2) and made.dtype == torch.bfloat16
    made.mul_(2)
    assert Empty.used == [torch.ops.aten.mul_.Tensor]


def test_operators_reach_dispatch_under_these_names():
    seen = []

    class Watch(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    values = [torch.ones(2)]
    with Watch():
        values[0].to(torch.float64)
        torch._foreach_norm(values)
        torch._foreach_mul_(values, 2.0)
        torch._foreach_mul_(values, torch.tensor(2.0))
        torch._amp_foreach_non_finite_check_and_unscale_(values, torch.zeros(1), torch.ones(1))
    assert {
        compat.COPY_AS,
        compat.NORM_OF_EACH,
        compat.MULTIPLY_EACH_BY_NUMBER,
        compat.MULTIPLY_EACH_BY_TENSOR,
        compat.UNSCALE_EACH,
    } <= set(seen)


def test_the_schema_of_an_operator_names_the_arguments_that_it_writes_to():
    add = torch.ops.aten.add_.Tensor
    assert compat.writes_to_arguments(add) and not compat.writes_to_arguments(torch.ops.aten.add.Tensor)
    written = [each.name for each in compat.arguments_of(add) if each.alias_info is not None and each.alias_info.is_write]
    assert written == ["self"]


def test_a_view_is_a_user_of_the_storage():
    tensor = torch.ones(4)
    storage = compat.storage_address(tensor.untyped_storage())
    alone = compat.users_of_storage(storage)
    view = tensor[1:]
    assert compat.users_of_storage(storage) == alone + 1
    del view
    gc.collect()
    assert compat.users_of_storage(storage) == alone


def test_storages_without_memory_have_addresses_of_their_own():
    first, second = (torch.empty(4, device="meta").untyped_storage() for _ in range(2))
    assert compat.storage_address(first) != compat.storage_address(second)


def test_values_are_copied_into_their_places():
    into = [torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16)]
    compat.copy_each(into, [torch.ones(2), torch.full((3,), 2.0)])
    assert torch.equal(into[0], torch.ones(2)) and torch.equal(into[1], torch.full((3,), 2.0, dtype=torch.bfloat16))


def test_trees_are_mapped_and_their_leaves_listed():
    tree = (1, [2, {"three": 3}])
    assert compat.tree_map(lambda leaf: leaf * 2, tree) == (2, [4, {"three": 6}])
    assert compat.tree_leaves(tree) == [1, 2, 3]


def test_the_default_store_and_the_active_data_parallel_are_found(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        compat.default_store().set("key", "value")
        assert compat.default_store().get("key") == b"value"
        found = []
        model = torch.nn.Linear(2, 1)
        model.register_forward_pre_hook(lambda *_: found.append(compat.active_data_parallel()))
        around = torch.nn.parallel.DistributedDataParallel(model)
        around(torch.ones(2))
        assert found == [around]
        assert compat.active_data_parallel() is None
        around.require_backward_grad_sync = False  # as its no_sync() does
        with around.no_sync():
            assert around.require_backward_grad_sync is False
    finally:
        torch.distributed.destroy_process_group()


def test_schedulers_neither_wrap_a_marked_step_nor_warn_after_a_counted_one(recwarn):
    class Ours(torch.optim.SGD):
        @compat.leave_uncounted
        def step(self, closure=None):
            compat.count_step(self)

    optimizer = Ours([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    step = optimizer.step
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert optimizer.step == step
    optimizer.step()
    scheduler.step()
    assert not [each for each in recwarn if "lr_scheduler.step()" in str(each.message)]


def test_a_view_knows_its_base():
    whole = torch.ones(4)
    assert compat.base_of(whole[1:]) is whole
    assert compat.base_of(whole) is whole


def test_a_function_is_called_before_torch_compiles():
    called = []
    ignore = compat.call_before_compiling(lambda: called.append("before"))
    doubled = torch.compile(lambda values: values * 2, backend=lambda graph, _: called.append("compiles") or graph)
    doubled(torch.ones(2))
    doubled(torch.ones(2))
    assert called == ["before", "compiles"]
    assert compat.has_compiled()
    ignore()
    doubled(torch.ones(3, 3))
    assert called == ["before", "compiles", "compiles"]


def test_nothing_is_compiled_at_first():
    code = "import torch; from ballast._torch_compat import has_compiled; torch.ones(2) + 1; print(has_compiled())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_functions_are_called_around_a_module_that_is_compiled_in_place():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.compile(torch.nn.Linear(2, 2), backend="eager"))
    model[0].compile(backend="eager")
    assert {each for each, _ in compat.compiled_modules(model)} == {model[0], model[1].get_submodule("_orig_mod")}
    assert {called for _, called in compat.compiled_modules(model)} == {model[0], model[1]}
    calls = []
    remove = compat.call_around(model[0], lambda module: calls.append("before"), lambda module: calls.append("after"))
    model(torch.ones(2))
    assert calls == ["before", "after"]
    remove()
    model(torch.ones(2))
    assert calls == ["before", "after"]


def test_references_to_a_tensor_are_counted():
    holder, tensor = torch.zeros(1), torch.zeros(1)
    other = tensor
    assert compat.references_to(tensor) == compat.references_to(other) == 1  # all of Python is one
    holder.grad = tensor
    assert compat.references_to(tensor) == 2


def test_the_graph_shows_the_parameter_that_was_cast():
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    with torch.autocast("cpu", torch.bfloat16):
        product = torch.ones(2, 2, requires_grad=True) @ parameter
    cast = parameter.bfloat16()
    assert cast.grad_fn.name() == "ToCopyBackward0"
    assert cast.grad_fn.next_functions[0][0].variable is parameter
    assert "ToCopyBackward0" in [node.name() for node, _ in product.grad_fn.next_functions]


def test_calls_have_a_compiler_only_while_torch_compiles():
    seen = []

    @torch.compiler.disable(recursive=False)
    def look(values):
        seen.append(compat.compiler_of_calls())
        return values

    compiled = torch.compile(lambda values: look(values + 1) + 1, backend="eager")
    assert compat.compiler_of_calls() is None
    compiled(torch.ones(2))
    assert seen[0] is not None
    assert compat.compiler_of_calls() is None


def test_a_weak_reference_keeps_others_from_the_address_of_a_storage():
    storage = torch.ones(3).untyped_storage()
    address, weak = compat.storage_address(storage), compat.WeakStorage(storage)
    assert not weak.expired()
    del storage
    assert weak.expired()
    others = [torch.ones(3).untyped_storage() for _ in range(100)]
    assert address not in map(compat.storage_address, others)
