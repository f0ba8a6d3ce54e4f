"""The memory in which stage 3 keeps parameters gathered from forward to backward, where no option says how much that is."""

from __future__ import annotations

import logging
from functools import partial

from ballast import _core
from ballast.errors import FailureError, OutOfMemoryError
from ballast.planning.hardware import available_memory, this_machine
from ballast.ranks import Group, agree_on_memory, from_all_ranks, words_of_all_ranks
from ballast.sizes import human_size
from ballast.torch.gpu import free_bytes
from ballast.torch.memory import bytes_below_peak

log = logging.getLogger("ballast")

FIRST_STEPS = 3  # later steps take as much memory as these
LAST_STEPS = 20  # a training whose order still changes by then keeps nothing
STEPS_BETWEEN_LOOKS = 16  # steps between looks at the free memory
USED_FRACTION = 0.75  # the part of what the first steps leave; the rest is for larger batches, and for other programs


def gathered_memory_for(core: _core.Training, ranks: Group, budget: int | None, gpu: int | None) -> GatheredMemory | None:
    """Return what gives memory to gathered parameters: that which `budget` leaves of the device, or what is free on a host with
    CPUs, if gathers come from other hosts. None if they keep the least. All ranks call it together.

    Torch's memory on a GPU may grow at any time, and cannot ask for any back, so without a budget nothing is kept there.
    """
    if budget is not None:
        return GatheredMemory(core, ranks, budget, ranks_here=1)
    machines = [] if gpu is not None else from_all_ranks(ranks, _core.machine_name())
    ranks_here = machines.count(_core.machine_name())
    return GatheredMemory(core, ranks, None, ranks_here) if ranks_here < len(machines) else None


def has_room(ranks: Group, needed: int, budget: int | None, gpu: int | None) -> bool:
    """Return whether each rank has memory for so many bytes more, within the budget. All ranks call it together."""
    if gpu is not None:
        free = free_bytes(gpu)
    else:
        machine = _core.machine_name()
        free = available_memory(this_machine()) // from_all_ranks(ranks, machine).count(machine)
    mine = int(USED_FRACTION * free) if budget is None else min(budget, free)
    [all_ranks] = words_of_all_ranks(ranks, [mine])
    return needed <= min(all_ranks)


class GatheredMemory:
    """Changes the memory for gathered parameters after steps, on all ranks together."""

    def __init__(self, core: _core.Training, ranks: Group, budget: int | None, ranks_here: int):
        self._core, self._ranks, self._budget, self._ranks_here = core, ranks, budget, ranks_here
        self._steps = 0
        self._least = core.gathered_bytes  # the bytes if nothing is kept
        self._headroom = 0  # bytes that are left to all else on this rank

    @property
    def _kept(self) -> int:
        return self._core.gathered_bytes - self._least

    def after_step(self, metrics: _core.StepMetrics) -> bool:
        """Return whether to call this again."""
        self._steps += 1
        if self._kept > 0:
            return self._steps % STEPS_BETWEEN_LOOKS > 0 or self._give_back(metrics)
        if self._steps >= FIRST_STEPS and metrics.on_demand == 0:  # steps follow the program, which uses what is kept
            return self._keep(metrics)
        return self._steps < LAST_STEPS

    def _keep(self, metrics: _core.StepMetrics) -> bool:
        free = self._free(metrics)
        self._change(self._least_of_ranks(free if self._budget is not None else int(USED_FRACTION * free)))
        self._headroom = free - self._kept
        if self._kept > 0 and self._ranks.rank == 0:
            log.info(
                "from now on parameters stay gathered from forward to backward in %s of %s that are free on each rank; "
                "tuning=ballast.Tuning(keep_gathered=False) gathers them twice",
                human_size(self._kept),
                human_size(free),
            )
        return self._kept > 0 and self._budget is None

    def _give_back(self, metrics: _core.StepMetrics) -> bool:
        """Keep less if half of what was left to all else is gone on any rank."""
        missing = self._headroom - self._free(metrics)
        before = self._kept
        wanted = self._least_of_ranks(before if 2 * missing < self._headroom else max(before - 2 * missing, 0))
        if wanted < before:
            self._change(wanted)
            if self._ranks.rank == 0:
                log.info("less memory is free: parameters stay gathered in %s of each rank", human_size(self._kept))
        return self._kept > 0

    def _free(self, metrics: _core.StepMetrics) -> int:
        if self._budget is not None:
            return max(self._budget - metrics.memory["device"], 0)
        return max(available_memory(this_machine()) // self._ranks_here - bytes_below_peak(), 0)

    def _least_of_ranks(self, mine: int) -> int:
        [all_ranks] = words_of_all_ranks(self._ranks, [mine])
        return min(all_ranks)

    def _change(self, kept: int) -> None:
        try:
            agree = partial(agree_on_memory, self._ranks, "a change of gathered memory")
            self._core.keep_gathered(self._least + kept, agree=agree)
        except (OutOfMemoryError, FailureError) as error:
            log.info("parameters do not stay gathered: %s", error)
