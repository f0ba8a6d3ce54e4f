"""Tests of hosts that train on their own, and exchange parameters through an outer optimizer. Hosts are ranks of one
machine."""

import shutil
from dataclasses import replace

import ballast
import pytest
import torch
from ballast import DiLoCo
from python.wrap.support import outer
from python.wrap.support.loops import Loop, Tower, mean_square_in_bfloat16, mlp_in_bfloat16
from python.wrap.support.ranks import run_ranks


def check_close(mine, theirs, tolerance=2e-6):
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def is_equal(mine, theirs):
    return all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


# --- Values ---


def test_an_exchange_in_each_step_averages_the_parameters_of_the_hosts():
    trained = run_ranks(4, outer.train, [{"stage": 2, "outer": DiLoCo(every=1, lr=1, momentum=0, hosts=2)}])
    expected = outer.PlainTorch(hosts=2, ranks=2, every=1, lr=1.0, momentum=0.0).train()
    for [(_, parameters)] in trained:
        check_close(parameters, expected[0])
        assert is_equal(parameters, trained[0][0][1])


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_and_several_steps_give_the_values_of_plain_torch(nesterov):
    options = {"stage": 2, "outer": DiLoCo(every=4, hosts=2, nesterov=nesterov)}
    trained = run_ranks(4, outer.train, [options], {"steps": 10})
    expected = outer.PlainTorch(hosts=2, ranks=2, every=4, nesterov=nesterov, steps=10).train()
    for rank, [(_, parameters)] in enumerate(trained):
        check_close(parameters, expected[rank // 2])
    assert is_equal(trained[0][0][1], trained[1][0][1])
    assert not is_equal(trained[0][0][1], trained[2][0][1])  # two steps after an exchange


def test_fragments_are_exchanged_at_steps_of_their_own():
    options = {"stage": 2, "outer": DiLoCo(every=4, hosts=3, fragments=2)}
    trained = run_ranks(3, outer.train, [options], {"steps": 7})
    due = [(2, slice(0, 1)), (4, slice(1, 4))]  # the first weight has most of the elements
    expected = outer.PlainTorch(hosts=3, ranks=1, every=4, due=due, steps=7).train()
    for rank, [(_, parameters)] in enumerate(trained):
        check_close(parameters, expected[rank])


def test_clipping_works_inside_of_a_host():
    options = {"stage": 2, "max_grad_norm": 0.1, "outer": DiLoCo(every=3, hosts=2)}
    trained = run_ranks(2, outer.train, [options])
    expected = outer.PlainTorch(hosts=2, ranks=1, every=3, clip=0.1).train()
    for [(_, parameters)] in trained:
        check_close(parameters, expected[0])


def test_schedulers_and_accumulation_work_inside_of_a_host():
    one, other = run_ranks(2, outer.with_scheduler, {"stage": 2, "outer": DiLoCo(every=3, hosts=2)})
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
    trained = run_ranks(4, outer.train, everywhere(tmp_path, fragments=fragments), {"make_model": Tower, "steps": 5})
    for first, *others in trained:
        for losses, parameters in others:
            assert losses == first[0]
            assert is_equal(parameters, first[1])


def test_hosts_have_the_same_bits_after_an_exchange_of_16_bit_parameters(tmp_path):
    changes = {"make_model": mlp_in_bfloat16, "loss": mean_square_in_bfloat16}
    formats = ["split", "compact", "4bit"]
    configurations = [{"stage": 3, "state_format": each, "outer": DiLoCo(every=3, hosts=2)} for each in formats]
    trained = run_ranks(4, outer.train, configurations, changes)
    for of_rank in trained:
        for (_, parameters), (_, of_first) in zip(of_rank, trained[0], strict=True):
            assert is_equal(parameters, of_first)


def test_the_default_format_of_new_tensors_does_not_matter(tmp_path):
    options = {"stage": 2, "outer": DiLoCo(every=3, hosts=2)}
    trained = run_ranks(2, outer.with_another_default_format, str(tmp_path), options)
    for kept, resumed in trained:
        assert is_equal(kept, trained[0][0])
        assert is_equal(resumed, kept)


@pytest.mark.parametrize("recorded", [False, True])
def test_hosts_begin_with_the_values_of_the_first_one(recorded):
    configurations = [{"stage": 3, "outer": DiLoCo(every=2, hosts=2)}]
    if not recorded:
        configurations.append({"stage": 2, "outer": DiLoCo(every=2, hosts=2)})
    trained = run_ranks(4, outer.from_other_values, configurations, recorded)
    assert all(is_equal(parameters, trained[0][0]) for of_rank in trained for parameters in of_rank)


def test_exchange_combines_the_hosts_at_the_end():
    trained = run_ranks(2, outer.exchanged, {"stage": 2, "outer": DiLoCo(every=4, hosts=2, fragments=2)})
    [(before, after), (before_there, after_there)] = trained
    assert not is_equal(before, before_there)
    assert is_equal(after, after_there)
    assert not is_equal(before, after)


def test_memory_and_metrics_count_the_outer_optimizer(tmp_path):
    for tier, where in (("host", "device"), (f"nvme:{tmp_path}", "nvme")):
        options = {"stage": 2, "outer": DiLoCo(every=2, hosts=2, fragments=2, offload=tier)}
        [(table, metrics), _] = run_ranks(2, outer.reports, options)
        assert "outer optimizer, fragment 1" in table
        assert where in table.partition("outer optimizer, fragment 1")[2]
        assert (metrics["outer/exchanges"], metrics["outer/hosts"]) == (6, 2)
        assert metrics["outer/bytes"] == 4 * 149  # of the last fragment: all but the first weight


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
    on_cpu = loop.run(stage=stage, outer=DiLoCo(every=2))
    for tier in ("device", "host"):
        on_gpu = replace(loop, device="emulated").run(stage=stage, outer=DiLoCo(every=2, offload=tier))
        with ballast.gather(on_gpu.model), ballast.gather(on_cpu.model):
            assert is_equal([parameter.cpu() for parameter in on_gpu.parameters], on_cpu.parameters)
        assert on_gpu.optimizer.metrics()["outer/exchanges"] == 2


# --- Checkpoints ---


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_resumed_training_continues_as_if_it_had_not_ended(fragments, tmp_path):
    folder = str(tmp_path / "checkpoint")
    configurations = everywhere(tmp_path, fragments=fragments)
    for options in configurations:
        options["outer"] = DiLoCo(**{**vars(options["outer"]), "every": 4})
    kept = run_ranks(4, outer.train_and_save, folder, configurations[3], 5, 10)
    resumed = run_ranks(4, outer.resume, folder, configurations, 5, 10)
    for (losses, parameters), of_rank in zip(kept, resumed, strict=True):
        for losses_there, parameters_there in of_rank:
            assert losses_there == losses[-5:]
            assert is_equal(parameters_there, parameters)


def test_another_number_of_hosts_resumes_a_checkpoint(tmp_path):
    folder = str(tmp_path)
    run_ranks(2, outer.train_and_save, folder, {"stage": 2, "outer": DiLoCo(every=4, hosts=2)}, 5, 5)
    resumed = run_ranks(3, outer.resume, folder, [{"stage": 3, "outer": DiLoCo(every=4, hosts=3)}], 5, 8)
    assert all(is_equal(of_rank[0][1], resumed[0][0][1]) for of_rank in resumed)


def test_hosts_load_the_last_step_that_one_of_them_has_saved(tmp_path):
    folder, options = str(tmp_path / "now"), {"stage": 2, "outer": DiLoCo(every=4, hosts=2)}
    run_ranks(2, outer.train_and_save, folder, options, 3, 3)
    shutil.copytree(tmp_path / "now" / "host-1", tmp_path / "old")
    kept = run_ranks(2, outer.train_and_save, folder, options, 5, 5)
    shutil.rmtree(tmp_path / "now" / "host-1")
    (tmp_path / "old").rename(tmp_path / "now" / "host-1")
    resumed = run_ranks(2, outer.resume, folder, [options], 5, 5)
    assert is_equal(resumed[0][0][1], kept[0][1])
    assert is_equal(resumed[1][0][1], kept[0][1])


def test_a_host_s_checkpoint_is_one_of_a_training_without_an_outer_optimizer(tmp_path):
    run_ranks(2, outer.train_and_save, str(tmp_path), {"stage": 2, "outer": DiLoCo(every=4, hosts=2)}, 5, 5)
    assert run_ranks(2, outer.resume_on_one_host, str(tmp_path / "host-0"), {"stage": 3}) == [6, 6]
    with pytest.raises(ballast.UsageError, match="host-0, host-1"):
        outer.resume_on_one_host(0, str(tmp_path), {"stage": 3})


def test_an_outer_optimizer_begins_with_a_checkpoint_of_a_training_without_one(tmp_path):
    run_ranks(2, outer.train_and_save, str(tmp_path), {"stage": 2}, 4, 4)
    resumed = run_ranks(2, outer.resume, str(tmp_path), [{"stage": 2, "outer": DiLoCo(every=4, hosts=2)}], 4, 8)
    assert is_equal(resumed[0][0][1], resumed[1][0][1])


# --- Lost hosts ---


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_leaves_the_others_training(stage, lost):
    options = {"stage": stage, "outer": DiLoCo(every=4, hosts=3, survive_lost_hosts=True)}
    ended = run_ranks(3, outer.lose_between_steps, lost, 5, options, lost=[lost])
    expected = outer.PlainTorch(hosts=3, ranks=1, every=4, steps=8, lost=(lost, 5)).train()
    left = [host for host in range(3) if host != lost]
    for host in left:
        (_, parameters), lines = ended[host]
        check_close(parameters, expected[host])
        assert is_equal(parameters, ended[left[0]][0][1])
        assert any(f"lost host {lost} (" in line and "2 of 3 hosts continue" in line for line in lines)


def test_a_host_that_is_lost_in_an_exchange_leaves_the_others_training():
    options = {"stage": 2, "outer": DiLoCo(every=4, hosts=3, survive_lost_hosts=True)}
    ended = run_ranks(3, outer.lose_in_exchange, 2, options, lost=[2])
    expected = outer.PlainTorch(hosts=3, ranks=1, every=4, steps=8, lost=(2, 5)).train()
    for host in (0, 1):
        check_close(ended[host][0][1], expected[host])
        assert is_equal(ended[host][0][1], ended[0][0][1])


def test_a_host_that_has_missed_the_end_of_an_exchange_catches_up():
    options = {"stage": 2, "outer": DiLoCo(every=4, hosts=3, survive_lost_hosts=True)}
    ended = run_ranks(3, outer.lose_at_the_end_of_an_exchange, 2, 1, options, lost=[2])
    expected = outer.PlainTorch(hosts=3, ranks=1, every=4, steps=8, lost=(2, 5)).train()
    for host in (0, 1):
        check_close(ended[host][0][1], expected[host])
        assert is_equal(ended[host][0][1], ended[0][0][1])


def test_one_host_continues_alone():
    options = {"stage": 2, "outer": DiLoCo(every=4, hosts=2, survive_lost_hosts=True)}
    ended = run_ranks(4, outer.lose_between_steps, 1, 5, options, lost=[0, 1])  # rank 0 fails with its neighbour
    expected = outer.PlainTorch(hosts=2, ranks=2, every=4, steps=8, lost=(0, 5)).train()
    for rank in (2, 3):
        check_close(ended[rank][0][1], expected[1])


def test_without_the_option_a_lost_host_ends_the_others():
    ended = run_ranks(3, outer.lose_and_fail, 1, {"stage": 2, "outer": DiLoCo(every=4, hosts=3)}, lost=[1])
    for host in (0, 2):
        assert "B3301 rank 1 (" in ended[host]


# --- Refusals ---

REFUSED = {
    "every=0": {"every": 0},
    "every=True": {"every": True},
    "cannot exchange 3 fragments within 2 steps": {"every": 2, "fragments": 3},
    "lr=0": {"every": 2, "lr": 0},
    "momentum=1": {"every": 2, "momentum": 1},
    "hosts=0": {"every": 2, "hosts": 0},
    "offload='nvme'": {"every": 2, "offload": "nvme"},
    "offload='host:/tmp'": {"every": 2, "offload": "host:/tmp"},
    "offload=None": {"every": 2, "offload": None},
    'there is no tier "disk"': {"every": 2, "offload": "disk"},
    "/not/there is no directory": {"every": 2, "offload": "nvme:/not/there"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_options_that_are_not_possible_are_refused(words):
    with pytest.raises(ballast.UsageError, match="B1001") as refused:
        DiLoCo(**REFUSED[words])
    assert words in str(refused.value)


def test_wraps_that_are_not_possible_are_refused(tmp_path):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ballast.UsageError, match="cannot use outer=64"):
        ballast.wrap(optimizer, model, outer=64)
    with pytest.raises(ballast.UsageError, match="exclude each other"):
        state = {"state": f"nvme:{tmp_path}"}
        ballast.wrap(optimizer, model, outer=DiLoCo(every=2), run="mine", offload=state)
    wrapped = ballast.wrap(optimizer, model)
    with pytest.raises(ballast.UsageError, match="there is no outer optimizer"):
        wrapped.exchange()


def test_ranks_that_do_not_fit_together_are_refused():
    for words, options_of in {
        "cannot divide 3 ranks into 2 hosts": {0: {"outer": DiLoCo(every=2, hosts=2)}},
        "rank 1 has another every of DiLoCo than rank 0": {
            0: {"outer": DiLoCo(every=2, hosts=3)},
            1: {"outer": DiLoCo(every=4, hosts=3)},
        },
    }.items():
        assert all(words in error for error in run_ranks(3, outer.error_of, options_of))


def test_other_parameters_are_refused_after_the_beginning():
    for error in run_ranks(2, outer.thaws, {"stage": 2, "outer": DiLoCo(every=2, hosts=2)}):
        assert "B1007 cannot train other parameters" in error
