"""Tests of a training's resident memory, as the kernel counts it."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ballast
import pytest
import torch
from ballast.options import RESERVE_ON_CPU
from ballast.torch.memory import keep_freed_memory
from ballast.torch.parameters.units import UNIT_ELEMENTS
from python.wrap.support.loops import keywords
from python.wrap.support.ranks import run_ranks
from python.wrap.support.resident import peak_resident, resident


@contextmanager
def memory_groups(count: int) -> Iterator[list[Path]]:
    """Make control groups whose memory can be limited, below that of this process; none where the system does not permit it."""
    groups = [each / f"ballast-test-{os.getpid()}-{number}" for each in _parent_of_groups() for number in range(count)]
    try:
        for group in groups:
            group.mkdir()
        yield groups if all(_limit_of(group).exists() for group in groups) else []
    except PermissionError:
        yield []
    finally:
        for group in groups:
            with suppress(FileNotFoundError):
                group.rmdir()


def enter_group(group: Path, most: int) -> None:
    """Move this process into the group, whose processes are killed when their memory from now on is more than this."""
    _limit_of(group).write_text(str(most))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _parent_of_groups() -> list[Path]:
    lines = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    version_1 = [of for _, controllers, of in lines if "memory" in controllers.split(",")]
    version_2 = [of for _, controllers, of in lines if not controllers]
    mount = "/sys/fs/cgroup/memory" if version_1 else "/sys/fs/cgroup"
    parents = [Path(mount, of.lstrip("/")) for of in version_1 or version_2]
    return [each for each in parents if os.access(each, os.W_OK)]


def _limit_of(group: Path) -> Path:
    of_version_1 = group / "memory.limit_in_bytes"
    return of_version_1 if of_version_1.exists() else group / "memory.max"


LAYERS = 64
WIDE, NARROW = 1024, 384


def layers(width: int, dtype: torch.dtype) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(LAYERS)))


def growth_of_the_peak_at_the_start(rank: int, stage: int) -> int:
    model = layers(WIDE, torch.bfloat16)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=stage)
    before = peak_resident(begin=True)
    model(torch.zeros(1, WIDE, dtype=torch.bfloat16))
    assert optimizer.steps == 0
    return peak_resident() - before


def test_no_rank_holds_its_parameters_twice_when_training_begins():
    """Parameters and remainders of the master take twice the bytes of torch's parameters, and so do sums of gradients. One unit
    has its parameters twice, and the gradients of two are on their way."""
    parameters = LAYERS * WIDE * WIDE * torch.bfloat16.itemsize
    unit = UNIT_ELEMENTS * torch.bfloat16.itemsize
    for stage in (2, 3):
        [growth] = run_ranks(1, growth_of_the_peak_at_the_start, stage)
        assert growth < (2 + 2 - 1) * parameters + 3 * unit + parameters // 4


def growth_of_the_peak_when_a_layer_freezes(rank: int, stage: int, dtype: torch.dtype) -> int:
    model = layers(NARROW, dtype)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=stage)
    model(torch.ones(1, NARROW, dtype=dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = peak_resident(begin=True)
    model[0].requires_grad_(False)
    model(torch.ones(1, NARROW, dtype=dtype))
    assert optimizer.steps == 1
    return peak_resident() - before


def test_no_rank_holds_all_state_when_a_layer_freezes():
    """A rank's shard has three values for each of an eighth of the elements. Gathered moments would add two values for each
    element. In stage 3 gathered parameters would exceed the bound too, even where freed gradients leave room for a part of
    them. With many ranks and small layers, the memory that a rank may take is far below these bounds."""
    layer_bytes = LAYERS * NARROW * NARROW * torch.float32.itemsize
    for dtype in (torch.float32, torch.bfloat16):
        for stage, bound in ((2, 2 * layer_bytes), (3, layer_bytes * 3 // 4)):
            for growth in run_ranks(8, growth_of_the_peak_when_a_layer_freezes, stage, dtype):
                assert growth < bound


def heap_after_free(rank: int) -> tuple[bool, int]:
    """Return whether a large block is a part of the heap, and by how many bytes the heap shrinks when it is freed."""
    c = ctypes.CDLL(None)
    for function in (c.malloc, c.sbrk):
        function.restype = ctypes.c_size_t
    keep_freed_memory()
    block = c.malloc(ctypes.c_size_t(24 << 20))
    end = c.sbrk(0)
    c.free(ctypes.c_void_p(block))
    return block < end, end - c.sbrk(0)


def test_pages_of_gradients_are_used_again():
    """Large blocks stay in the heap. Else the kernel would clear new pages, one by one, for the next gradients."""
    assert run_ranks(1, heap_after_free) == [(True, 0)]


MIB = 1 << 20
IN_A_CONTAINER, STEPS = 48, 5


def train_deferred(options, layers: int, steps: int) -> int:
    """Return the planned bytes of this rank's memory. Gradients of other batches leave other holes."""
    with ballast.deferred():
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDE, WIDE, bias=False) for _ in range(layers)))
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, **keywords(stage=3, **options))
    for step in range(steps):
        model(torch.ones(1 + step % 3, WIDE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    figures = optimizer.metrics()
    return int(figures["memory_bytes/device"] + figures["memory_bytes/host"])


def planned_bytes(rank: int, options) -> int:
    return train_deferred(options, IN_A_CONTAINER, 1)


def train_in_a_group(rank: int, options, groups: list[Path], most: list[int]) -> bool:
    train_deferred({}, 1, 2)  # modules that are imported by a first step belong to Python and torch
    enter_group(groups[rank], most[rank])
    train_deferred(options, IN_A_CONTAINER, STEPS)
    return True


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_a_training_stays_in_a_container_of_the_planned_size(tier, tmp_path):
    drive = f"nvme:{tmp_path}"
    options = {} if tier == "device" else {"offload": {"parameters": drive, "gradients": "host", "state": drive}}
    most = [bytes_of_plan + 64 * MIB for bytes_of_plan in run_ranks(2, planned_bytes, options)]
    with memory_groups(2) as groups:
        if not groups:
            pytest.skip("limiting the memory of a control group needs root, and a group that delegates it")
        assert run_ranks(2, train_in_a_group, options, groups, most) == [True, True]


def resident_with_torch(rank: int) -> int:
    train_deferred({}, 1, 2)
    return resident()


def test_the_plan_reserves_what_a_process_on_cpus_takes():
    for before in run_ranks(2, resident_with_torch):
        assert RESERVE_ON_CPU // 2 < before < RESERVE_ON_CPU - 48 * MIB


def save_in_a_group(rank: int, folder: Path, groups: list[Path], most: list[int], loads: bool) -> int:
    """Save, or load what other ranks have saved, with the state on a drive. Return the bytes of the checkpoint."""
    train_deferred({}, 1, 2)
    enter_group(groups[rank], most[rank])
    drive = f"nvme:{folder}"
    with ballast.deferred():
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDE, WIDE, bias=False) for _ in range(IN_A_CONTAINER)))
    options = keywords(stage=3, offload={"parameters": drive, "gradients": "host", "state": drive})
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, **options)
    if loads:
        ballast.load_checkpoint(folder / "saved", model, optimizer)
    ballast.save(folder / "saved", model, optimizer)
    _limit_of(groups[rank]).write_text(str(8 * most[rank]))  # the parameters return to torch's memory at the end
    return sum(path.stat().st_size for path in (folder / "saved").rglob("*.data"))


def test_saving_and_loading_take_the_same_memory_however_large_the_state_is(tmp_path):
    """Besides what the plan has, a rank keeps 16 MiB that are written, 32 MiB that are read, and a chunk of each."""
    drive = f"nvme:{tmp_path}"
    options = {"offload": {"parameters": drive, "gradients": "host", "state": drive}}
    for ranks, loads in ((2, False), (3, True), (1, True)):
        most = [bytes_of_plan + 128 * MIB for bytes_of_plan in run_ranks(ranks, planned_bytes, options)]
        with memory_groups(ranks) as groups:
            if not groups:
                pytest.skip("limiting the memory of a control group needs root, and a group that delegates it")
            for size in run_ranks(ranks, save_in_a_group, tmp_path, groups, most, loads):
                assert size > 4 * 128 * MIB
