"""Tests of hosts that train on their own, and exchange parameters through an outer optimizer. Hosts are ranks of one
machine."""

from __future__ import annotations

import os
import shutil
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
import torch.distributed as dist
from ballast import DiLoCo, _core
from ballast.checkpoint.manifest import outline_in
from ballast.checkpoint.outer import outer_tensors
from ballast.outer.fragments import fragment_elements
from ballast.outer.hosts import HostGroup
from ballast.outer.optimizer import Fragment
from ballast.torch.parameters.units import model_of
from ballast.torch.updates.sharded_state import ShardedState
from python.wrap.support import outer
from python.wrap.support.loops import Loop, Run, Tower, keywords, mean_square, mean_square_in_bfloat16, mlp, mlp_in_bfloat16
from python.wrap.support.outer import Before, Changes, PlainTorch, Trained, check_close, is_equal, loop_of, result_of, resume
from python.wrap.support.ranks import run_ranks


def train(rank: int, configurations: list[dict[str, Any]], changes: Changes | None = None) -> list[Trained]:
    """Train in each configuration of wrap(), and return the losses and the final parameters."""
    trained = []
    for options in configurations:
        run = loop_of(rank, **(changes or {})).run(**options)
        trained.append(result_of(run))
        run.optimizer.close()
    return trained


def from_other_values(rank: int, configurations: list[dict[str, Any]], recorded: bool) -> list[list[torch.Tensor]]:
    """Train two steps from values that differ on all ranks."""

    def make_model() -> torch.nn.Module:
        torch.manual_seed(rank)
        return torch.nn.Sequential(torch.nn.Linear(20, 96), torch.nn.Tanh(), torch.nn.Linear(96, 5))  # one is recorded

    def make_recorded() -> torch.nn.Module:
        with ballast.deferred():
            return make_model()

    loop = loop_of(rank, steps=2, make_model=make_recorded if recorded else make_model)
    return [result_of(loop.run(**options))[1] for options in configurations]


def with_another_default_format(rank: int, folder: str, options: dict[str, Any]) -> list[list[torch.Tensor]]:
    """Return the parameters at the end, and those of a training that was resumed, where new tensors are bfloat16."""
    torch.set_default_dtype(torch.bfloat16)
    changes: Changes = {"loss": mean_square_in_bfloat16}
    kept = train_and_save(rank, folder, options, 3, 6, changes)
    [resumed] = resume(rank, folder, [options], 3, 6, changes)
    return [kept[1], resumed[1]]


def reports(rank: int, options: dict[str, Any]) -> tuple[str, dict[str, float]]:
    run = loop_of(rank).run(**options)
    return run.optimizer.memory(), run.optimizer.metrics()


def elements_of_fragments(rank: int, configurations: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """Return the elements of each fragment as the planner counts them, and as they are on this rank."""
    found, outer = [], ballast.DiLoCo(every=4, hosts=2, fragments=2)
    for options in configurations:
        run = loop_of(rank, steps=1).run(**options, outer=outer)
        training, ranks = run.optimizer._ballast, run.optimizer._ballast.group
        units = training.partitioner.units(training.current.members, options["stage"])
        question = _core.Question(model_of(units), _core.Machine())
        question.ranks = ranks.size
        placement = _core.placement_of_stage(options["stage"], ranks.size)
        expected = fragment_elements(question, placement, outer, ranks.rank)
        found.append((expected, [fragment.elements for fragment in run.optimizer._ballast.outer.fragments]))
        run.optimizer.close()
    return found


def exchanges_of(rank: int, folder: str, options: dict[str, Any]) -> tuple[list[list[torch.Tensor]], list[float]]:
    """Return the parameters before exchange(), after it, after a second one, and after one that follows a checkpoint; and the
    numbers of exchanges at these points."""
    run, parameters, exchanges = loop_of(rank).run(**options), [], []

    def note(run: Run) -> None:
        parameters.append(result_of(run)[1])
        exchanges.append(run.optimizer._ballast.outer.figures()["outer/exchanges"])

    note(run)
    for _ in range(2):
        run.optimizer.exchange()
        note(run)
    ballast.save(folder, run.model, run.optimizer)
    resumed = loop_of(rank, steps=0).run(**options)
    ballast.load_checkpoint(folder, resumed.model, resumed.optimizer)
    resumed.optimizer.exchange()
    note(resumed)
    return parameters, exchanges


def with_scheduler(rank: int, options: dict[str, Any]) -> list[torch.Tensor]:
    loop = loop_of(rank, micro_steps=2)
    model = loop.make_model()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **keywords(**options))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return result_of(replace(loop, after_step=lambda *_: scheduler.step()).train(model, optimizer))[1]


def with_codes(
    rank: int, folder: str, configurations: list[dict[str, Any]], exact: dict[str, Any], changes: Changes
) -> list[list[torch.Tensor]]:
    """Return the parameters after two exchanges: without codes, in each configuration, and of a training that is resumed after
    the first exchange and another step."""
    trained = [parameters for _, parameters in train(rank, [exact, *configurations], {**changes, "steps": 8})]
    loop = loop_of(rank, steps=5, **changes)
    run = loop.run(**configurations[0])
    ballast.save(folder, run.model, run.optimizer)
    run.optimizer.close()
    [(_, resumed)] = resume(rank, folder, [configurations[-1]], 5, 8, changes)
    return [*trained, resumed]


def exchange_after_the_neighbour(rank: int, folder: str, options: dict[str, Any]) -> bool:
    """Train two steps, of which the second ends with an exchange. The second rank of each host is late for it. Return whether
    that had the averages when this rank began to change its parameters, which ranks of a host do together."""
    average, write, had = HostGroup.average, Fragment.write, []

    def average_late(group: HostGroup, values: torch.Tensor, **of_exchange: int) -> torch.Tensor:
        time.sleep(0.5 if group.own.rank == 1 else 0)
        averages = average(group, values, **of_exchange)
        Path(folder, f"rank-{rank}").touch()
        return averages

    def write_noting(fragment: Fragment, training: ShardedState, values: torch.Tensor) -> None:
        had.append(Path(folder, f"rank-{rank | 1}").exists())
        write(fragment, training, values)

    HostGroup.average, Fragment.write = average_late, write_noting  # type: ignore[method-assign]
    loop_of(rank, steps=2).run(**options)
    return had == [True]


def train_and_save(
    rank: int, folder: str, options: dict[str, Any], steps: int, until: int, changes: Changes | None = None
) -> Trained:
    """Save after some steps, and return what the training has at the end."""
    loop = loop_of(rank, steps=steps, **(changes or {}))
    run = loop.run(**options)
    ballast.save(folder, run.model, run.optimizer, extra={"rank": rank})
    return result_of(replace(loop, steps=until).train(run.model, run.optimizer, steps))


def train_and_save_twice(rank: int, folders: list[str], options: dict[str, Any]) -> list[torch.Tensor]:
    """Train three steps, save to the first folder, train two more, and save to the second one. Return the parameters."""
    loop = loop_of(rank, steps=3)
    run = loop.run(**options)
    ballast.save(folders[0], run.model, run.optimizer)
    run = replace(loop, steps=5).train(run.model, run.optimizer, 3)
    ballast.save(folders[1], run.model, run.optimizer)
    return result_of(run)[1]


def refused_folder(rank: int, folder: str, options: dict[str, Any]) -> str:
    """Return the error of loading a checkpoint."""
    loaded = loop_of(rank, steps=0).run(**options)
    try:
        ballast.load_checkpoint(folder, loaded.model, loaded.optimizer)
    except ballast.UsageError as error:
        return str(error)
    return ""


def resume_after_a_skipped_step(rank: int, folder: str, options: dict[str, Any]) -> list[tuple[str, list[torch.Tensor]]]:
    """Train on two hosts, of which the second skips a step. Return the parameters at the end, of the training itself, and of
    those that resume it from a shared directory and from directories of their own; and the error of hosts that have loaded
    different states."""
    calls = [0]

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return mean_square(model, batch) * (torch.inf if calls[0] == 3 and rank == 1 else 1.0)

    run = loop_of(rank, steps=5, loss=loss).run(**options)
    assert run.optimizer.metrics()["skipped_steps"] == rank
    own = f"{folder}/own-{rank}"
    for directory in (f"{folder}/shared", own):
        ballast.save(directory, run.model, run.optimizer)
    parameters = [("", result_of(loop_of(rank, steps=10).train(run.model, run.optimizer, 5))[1])]
    run.optimizer.close()
    parameters += [("", resume(rank, directory, [options], 5, 10)[0][1]) for directory in (f"{folder}/shared", own)]
    return [*parameters, (resume_from_another_state(rank, own, options), [])]


def resume_from_another_state(rank: int, folder: str, options: dict[str, Any]) -> str:
    """Resume on hosts of which the second has another momentum. Return the error."""
    loaded = loop_of(rank, steps=0).run(**options)
    ballast.load_checkpoint(folder, loaded.model, loaded.optimizer)
    if rank == 1:
        state = loaded.optimizer._ballast.outer.fragments[0].state
        values, momentum = torch.empty(state.count), torch.empty(state.count)
        state.read(values, momentum)
        state.write(values, momentum + 1)
    try:
        loop_of(rank, steps=6).train(loaded.model, loaded.optimizer, 5)
    except ballast.UsageError as error:
        return str(error)
    return ""


def save_next_to_others(rank: int, folder: str, options: dict[str, Any]) -> list[str]:
    """Save where there is a folder of a host that does not take part. Return the folders afterwards."""
    run = loop_of(rank, steps=1).run(**options)
    ballast.save(folder, run.model, run.optimizer)
    dist.barrier()
    if rank == 0:
        shutil.copytree(f"{folder}/host-0", f"{folder}/host-5")
    dist.barrier()
    ballast.save(folder, run.model, run.optimizer)
    dist.barrier()
    return sorted(os.listdir(folder))


def resume_on_one_host(rank: int, folder: str, options: dict[str, Any]) -> int:
    """Load the checkpoint of one host without an outer optimizer."""
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1.0), model, **keywords(**options))
    ballast.load_checkpoint(folder, model, optimizer)
    steps: int = optimizer.steps
    loop_of(rank, steps=steps + 1).train(model, optimizer, steps)
    return int(optimizer.steps)


# --- Values ---


def test_an_exchange_in_each_step_averages_the_parameters_of_the_hosts():
    trained = run_ranks(4, train, [{"stage": 2, "outer": DiLoCo(every=1, lr=1, momentum=0, hosts=2)}])
    expected = PlainTorch(hosts=2, ranks=2, every=1, lr=1.0, momentum=0.0).train()
    for [(_, parameters)] in trained:
        check_close(parameters, expected[0])
        assert is_equal(parameters, trained[0][0][1])


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_and_several_steps_give_the_values_of_plain_torch(nesterov):
    options = {"stage": 2, "outer": DiLoCo(every=4, hosts=2, nesterov=nesterov)}
    trained = run_ranks(4, train, [options], {"steps": 10})
    expected = PlainTorch(hosts=2, ranks=2, every=4, nesterov=nesterov, steps=10).train()
    for rank, [(_, parameters)] in enumerate(trained):
        check_close(parameters, expected[rank // 2])
    assert is_equal(trained[0][0][1], trained[1][0][1])
    assert not is_equal(trained[0][0][1], trained[2][0][1])  # two steps after an exchange


def test_fragments_are_exchanged_at_steps_of_their_own():
    options = {"stage": 2, "outer": DiLoCo(every=4, hosts=3, fragments=2)}
    trained = run_ranks(3, train, [options], {"steps": 7})
    due = [(2, slice(0, 1)), (4, slice(1, 4))]  # the first weight has most of the elements
    expected = PlainTorch(hosts=3, ranks=1, every=4, due=due, steps=7).train()
    for rank, [(_, parameters)] in enumerate(trained):
        check_close(parameters, expected[rank])


def test_clipping_works_inside_of_a_host():
    options = {"stage": 2, "max_grad_norm": 0.1, "outer": DiLoCo(every=3, hosts=2)}
    trained = run_ranks(2, train, [options])
    expected = PlainTorch(hosts=2, ranks=1, every=3, clip=0.1).train()
    for [(_, parameters)] in trained:
        check_close(parameters, expected[0])


def test_schedulers_and_accumulation_work_inside_of_a_host():
    one, other = run_ranks(2, with_scheduler, {"stage": 2, "outer": DiLoCo(every=3, hosts=2)})
    expected = PlainTorch(hosts=2, ranks=1, every=3, micro_steps=2, halves_every=2).train()
    check_close(one, expected[0])
    assert is_equal(one, other)


def everywhere(folder, **changes):
    nvme = f"nvme:{folder}"
    inner = [
        {"stage": 0},
        {"stage": 1},
        {"stage": 2, "offload": nvme},
        {"stage": 3},
        {"stage": 3, "update_in_backward": True},
        {"stage": 3, "offload": {"parameters": nvme, "gradients": "host", "state": nvme}},
    ]
    tiers = ["device", "host", nvme]
    return [
        {**options, "outer": DiLoCo(every=2, hosts=2, offload=tiers[number % 3], **changes)}
        for number, options in enumerate(inner)
    ]


@pytest.mark.parametrize("fragments", [1, 2])
def test_all_stages_and_tiers_give_the_same_bits(fragments, tmp_path):
    trained = run_ranks(4, train, everywhere(tmp_path, fragments=fragments), {"make_model": Tower, "steps": 5})
    for first, *others in trained:
        for losses, parameters in others:
            assert losses == first[0]
            assert is_equal(parameters, first[1])


def test_hosts_have_the_same_bits_after_an_exchange_of_16_bit_parameters(tmp_path):
    changes = {"make_model": mlp_in_bfloat16, "loss": mean_square_in_bfloat16}
    formats = ["split", "compact", "4bit"]
    configurations = [{"stage": 3, "state_format": each, "outer": DiLoCo(every=3, hosts=2)} for each in formats]
    trained = run_ranks(4, train, configurations, changes)
    for of_rank in trained:
        for (_, parameters), (_, of_first) in zip(of_rank, trained[0], strict=True):
            assert is_equal(parameters, of_first)


def test_the_default_format_of_new_tensors_does_not_matter(tmp_path):
    options = {"stage": 2, "outer": DiLoCo(every=3, hosts=2)}
    trained = run_ranks(2, with_another_default_format, str(tmp_path), options)
    for kept, resumed in trained:
        assert is_equal(kept, trained[0][0])
        assert is_equal(resumed, kept)


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_hosts_that_exchange_codes_have_the_same_bits_and_resume(wire, tmp_path):
    """In all tiers of the outer optimizer, and after a resume, which draws the same random bits."""
    tiers = ["device", "host", f"nvme:{tmp_path}"]
    configurations = [{"stage": 2, "outer": DiLoCo(every=4, hosts=2, wire=wire, offload=tier)} for tier in tiers]
    exact = {"stage": 2, "outer": DiLoCo(every=4, hosts=2)}
    changes = {"make_model": Tower}
    trained = run_ranks(4, with_codes, str(tmp_path / "saved"), configurations, exact, changes)
    for with_exact, *in_codes in trained:
        for parameters in in_codes:
            assert is_equal(parameters, trained[0][1])
        assert not is_equal(in_codes[0], with_exact)
        check_close(in_codes[0], with_exact, tolerance=0.05)


@pytest.mark.parametrize("recorded", [False, True])
def test_hosts_begin_with_the_values_of_the_first_one(recorded):
    configurations = [{"stage": 3, "outer": DiLoCo(every=2, hosts=2)}]
    if not recorded:
        configurations.append({"stage": 2, "outer": DiLoCo(every=2, hosts=2)})
    trained = run_ranks(4, from_other_values, configurations, recorded)
    assert all(is_equal(parameters, trained[0][0]) for of_rank in trained for parameters in of_rank)


def test_exchange_combines_the_hosts_at_the_end_and_once(tmp_path):
    options = {"stage": 2, "outer": DiLoCo(every=4, hosts=2, fragments=2)}
    [(mine, exchanges), (there, _)] = run_ranks(2, exchanges_of, str(tmp_path), options)
    assert not is_equal(mine[0], there[0])
    assert is_equal(mine[1], there[1])
    assert not all(torch.equal(before, after) for before, after in zip(mine[0], mine[1]))
    assert is_equal(mine[1], mine[2])
    assert is_equal(mine[1], mine[3])
    # The first fragment is exchanged after steps 2 and 6, of 6, the second one after step 4 and by exchange().
    assert exchanges == [3, 4, 4, 0]


def test_memory_and_metrics_count_the_outer_optimizer(tmp_path):
    for tier, where in (("host", "device"), (f"nvme:{tmp_path}", "nvme")):
        options = {"stage": 2, "outer": DiLoCo(every=2, hosts=2, fragments=2, offload=tier)}
        [(table, metrics), (_, of_other)] = run_ranks(2, reports, options)
        assert "outer optimizer, fragment 1" in table
        assert where in table.partition("outer optimizer, fragment 1")[2]
        assert (metrics["outer/exchanges"], metrics["outer/hosts"]) == (6, 2)
        elements = 480, 149  # the first weight, and all others
        values = 3 * sum(4 * count for count in elements)
        assert values < of_other["outer/sent_bytes/inside"] < values + 2000  # the rest is what the hosts agree on
        assert values + 4 * sum(elements) < metrics["outer/sent_bytes/inside"]  # the initial values too
        assert metrics["outer/sent_bytes/across"] == 0
        assert metrics["outer/state_bytes"] == sum(8 * count for count in elements)


def test_the_elements_of_each_fragment_are_known_before(tmp_path):
    """Of all ranks, in all stages."""
    for of_rank in run_ranks(4, elements_of_fragments, [{"stage": stage} for stage in (0, 2, 3)]):
        for expected, elements in of_rank:
            assert expected == elements


def test_ranks_of_a_host_divide_what_each_of_them_has():
    both = run_ranks(4, reports, {"stage": 0, "outer": DiLoCo(every=2, hosts=2)})
    alone, _ = run_ranks(2, reports, {"stage": 0, "outer": DiLoCo(every=2, hosts=2)})
    assert sum(figures["outer/state_bytes"] for _, figures in both[:2]) == alone[1]["outer/state_bytes"]


def test_an_exchange_ends_when_the_neighbours_have_ended_it(tmp_path):
    options = {"stage": 2, "outer": DiLoCo(every=2, hosts=2)}
    assert run_ranks(4, exchange_after_the_neighbour, str(tmp_path), options) == [True] * 4


def test_one_process_is_one_host():
    model = torch.nn.Linear(4, 1)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, outer=DiLoCo(every=1, lr=0.5, momentum=0))
    before = model.weight.detach().clone()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    assert torch.allclose(before - model.weight, torch.full((1, 4), 0.05))


@pytest.mark.emulated
@pytest.mark.parametrize("stage", [2, 3])
def test_a_gpu_trains_as_a_cpu_does_with_the_outer_optimizer_on_either(stage):
    loop = Loop(steps=5)
    on_cpu, exchanged, freed = loop.run(stage=stage, outer=DiLoCo(every=2)), [], []
    for tier in ("device", "host"):
        on_gpu = replace(loop, device="emulated").run(stage=stage, outer=DiLoCo(every=2, offload=tier))
        with ballast.gather(on_gpu.model), ballast.gather(on_cpu.model):
            assert is_equal([parameter.cpu() for parameter in on_gpu.parameters], on_cpu.parameters)
        assert on_gpu.optimizer.metrics()["outer/exchanges"] == 2
        before = free_on_gpu()
        on_gpu.optimizer.offload()
        freed.append(free_on_gpu() - before)
        on_gpu.optimizer.reload()
        for run in (on_gpu, on_cpu) if tier == "host" else (on_gpu,):
            run.optimizer.exchange()
        exchanged.append([parameter.cpu() for parameter in outer.result_of(on_gpu)[1]])
    assert is_equal(*exchanged)
    assert is_equal(exchanged[0], outer.result_of(on_cpu)[1])
    assert freed[0] > freed[1]  # the outer optimizer's state leaves the GPU too


def free_on_gpu():
    torch.emulated.empty_cache()
    return torch.emulated.mem_get_info()[0]


def test_closing_leaves_the_hosts_when_something_fails(monkeypatch):
    run = Loop(steps=1).run(stage=2, outer=DiLoCo(every=4))
    training = run.optimizer._ballast
    monkeypatch.setattr(training, "_drop", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        training.close(together=False)
    assert not training.outer.has_begun


# --- Checkpoints ---


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_resumed_training_continues_as_if_it_had_not_ended(fragments, tmp_path):
    folder = str(tmp_path / "checkpoint")
    configurations = everywhere(tmp_path, fragments=fragments)
    for options in configurations:
        options["outer"] = DiLoCo(**{**vars(options["outer"]), "every": 4})
    kept = run_ranks(4, train_and_save, folder, configurations[3], 5, 10)
    resumed = run_ranks(4, outer.resume, folder, configurations, 5, 10)
    for (losses, parameters), of_rank in zip(kept, resumed, strict=True):
        for losses_there, parameters_there in of_rank:
            assert losses_there == losses[-5:]
            assert is_equal(parameters_there, parameters)


def test_another_number_of_hosts_resumes_a_checkpoint(tmp_path):
    folder = str(tmp_path)
    run_ranks(2, train_and_save, folder, {"stage": 2, "outer": DiLoCo(every=4, hosts=2)}, 5, 5)
    resumed = run_ranks(3, outer.resume, folder, [{"stage": 3, "outer": DiLoCo(every=4, hosts=3)}], 5, 10)
    before = Before(steps=5, hosts=2, ranks=1)
    expected = PlainTorch(hosts=3, ranks=1, every=4, steps=10, before=before).train()
    for of_rank, there in zip(resumed, expected, strict=True):
        check_close(of_rank[0][1], there)


def test_hosts_load_the_last_step_that_one_of_them_has_saved(tmp_path):
    now, options = tmp_path / "now", {"stage": 2, "outer": DiLoCo(every=4, hosts=2)}
    old = str(tmp_path / "old")
    kept = run_ranks(2, train_and_save_twice, [old, str(now)], options)
    shutil.rmtree(now / "host-1")
    shutil.copytree(f"{old}/host-1", now / "host-1")
    resumed = run_ranks(2, outer.resume, str(now), [options], 5, 5)
    assert is_equal(resumed[0][0][1], kept[0])
    assert is_equal(resumed[1][0][1], kept[0])


def test_folders_of_another_training_are_refused(tmp_path):
    mine, other, options = tmp_path / "mine", tmp_path / "other", {"stage": 2, "outer": DiLoCo(every=4, hosts=2)}
    run_ranks(2, train_and_save_twice, [str(mine), str(other)], options)
    run_ranks(2, train_and_save_twice, [str(tmp_path / "unused"), str(other)], options)  # a training of its own
    folders = mine / "host-0", mine / "host-1", other / "host-1"
    identity, same, another = (outline_in(folder).optimizers[0].outer_identity for folder in folders)
    assert identity == same != another
    shutil.rmtree(mine / "host-1")
    shutil.copytree(other / "host-1", mine / "host-1")
    for error in run_ranks(2, refused_folder, str(mine), options):
        assert "B1001 cannot load a checkpoint: the folders of the hosts are of different trainings" in error
        assert f"host-0 of {identity}, step 3" in error and "Remove the folders" in error


def test_a_host_s_checkpoint_is_one_of_a_training_without_an_outer_optimizer(tmp_path):
    run_ranks(2, train_and_save, str(tmp_path), {"stage": 2, "outer": DiLoCo(every=4, hosts=2)}, 5, 5)
    assert run_ranks(2, resume_on_one_host, str(tmp_path / "host-0"), {"stage": 3}) == [6, 6]
    with pytest.raises(ballast.UsageError, match="host-0, host-1"):
        resume_on_one_host(0, str(tmp_path), {"stage": 3})


def test_an_outer_optimizer_begins_with_a_checkpoint_of_a_training_without_one(tmp_path):
    run_ranks(2, train_and_save, str(tmp_path), {"stage": 2}, 4, 4)
    resumed = run_ranks(2, outer.resume, str(tmp_path), [{"stage": 2, "outer": DiLoCo(every=4, hosts=2)}], 4, 8)
    before = Before(steps=4, hosts=1, ranks=2, has_outer=False)
    expected = PlainTorch(hosts=2, ranks=1, every=4, steps=8, before=before).train()
    for of_rank, there in zip(resumed, expected, strict=True):
        check_close(of_rank[0][1], there)
    assert is_equal(resumed[0][0][1], resumed[1][0][1])


def test_hosts_that_have_skipped_different_steps_resume_the_same_step(tmp_path):
    resumed = run_ranks(2, resume_after_a_skipped_step, str(tmp_path), {"stage": 2, "outer": DiLoCo(every=4, hosts=2)})
    for [(_, kept), (_, shared), (_, own), (error, _)] in resumed:
        assert is_equal(shared, kept)
        assert is_equal(own, kept)
        assert "B1001 cannot continue to train: the hosts have loaded different states of the outer optimizer" in error
    assert not is_equal(resumed[0][0][1], resumed[1][0][1])


def test_saving_removes_the_folders_of_hosts_that_do_not_take_part(tmp_path):
    options = {"stage": 2, "outer": DiLoCo(every=4, hosts=2)}
    assert run_ranks(2, save_next_to_others, str(tmp_path), options) == [["host-0", "host-1"]] * 2


def test_saving_keeps_one_fragment_in_memory(monkeypatch):
    made, read = [], Fragment.state_values

    def recorded(fragment):
        values = read(fragment)
        made.extend(map(weakref.ref, values))
        return values

    monkeypatch.setattr(Fragment, "state_values", recorded)
    run = Loop(steps=2).run(stage=0, outer=DiLoCo(every=2, fragments=2))
    partition = run.optimizer._ballast.partition_now()
    held = list(outer_tensors(run.optimizer._ballast, partition, run.optimizer._ballast.names()))
    held[0].read()
    assert made[0]() is not None
    held[-1].read()
    assert made[0]() is None
    assert len(made) == 4  # the outer copy and the momentum of each fragment
