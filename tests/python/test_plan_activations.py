"""Tests that plans count activations that wait for backward on the host or on drives."""

import json

import ballast
import pytest
from ballast.planning.result import ESTIMATED
from ballast.sizes import human_time
from ballast.tools.command_line import main

LLAMA = {"model": "llama-8b", "ranks": 8, "gpu": "a100", "host_memory": "2TiB", "drive_space": "10TiB", "tokens": 8192}
HIDDEN, LAYERS = 4096, 32


def plan(activations, **changes):
    options = {**LLAMA, "activations": activations, **changes}
    return ballast.plan(options.pop("model"), **options)


def of_activations(found):
    return {tier: owners[ESTIMATED] for tier, owners in found.memory.items() if ESTIMATED in owners}


@pytest.mark.parametrize("amount, bytes_of_a_block", [("kept", 49 * HIDDEN), ("checkpointed", 2 * HIDDEN)])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_memory_moves_to_the_tier(amount, bytes_of_a_block, tier):
    here, away = plan(amount, gpu_memory="1TiB"), plan(f"{amount},{tier}", gpu_memory="1TiB")
    moved = of_activations(away)
    assert moved[tier] == 8192 * LAYERS * bytes_of_a_block
    assert moved["device"] < of_activations(here)["device"]
    assert tier == "host" or moved["host"] == 64 << 20
    assert away.seconds >= here.seconds
    assert away.budget == here.budget
    directory = ":DIRECTORY" if tier == "nvme" else ""
    assert f'activations="{tier}{directory}"' in away.wrap_call() and "activations" not in here.wrap_call()


def test_the_head_and_the_blocks_have_their_own_peaks():
    """Of Llama 8B, the loss takes 12 bytes for each logit. A block keeps 49 for each hidden element, and 24.5 of gradients."""
    saved = 2 * HIDDEN * LAYERS
    assert of_activations(plan("checkpointed"))["device"] == 8192 * (saved + 12 * 128256)
    no_head = {"model_type": "llama", "architectures": ["LlamaModel"], "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    found = of_activations(plan("checkpointed", model={**no_head, **sizes}, dtype="bf16"))
    assert found["device"] == 8192 * (saved + 49 * HIDDEN + 49 * HIDDEN // 2)


def test_activations_have_the_format_of_the_parameters():
    """An RMSNorm keeps 12 bytes of an element in fp32, and not 8: it computes in fp32 in both."""
    found = plan("checkpointed", model="llama-8b", dtype="fp32", gpu_memory="1TiB")
    assert of_activations(found)["device"] == 8192 * (4 * HIDDEN * LAYERS + 12 * 128256)
    kept = plan("kept,host", dtype="fp32", gpu_memory="1TiB")
    assert of_activations(kept)["host"] == 8192 * LAYERS * (2 * 49 - 8) * HIDDEN
    assert any("TF32" in note for note in found.notes)
    assert not any("TF32" in note for note in plan("checkpointed").notes)


def test_settings_that_save_time_are_listed(capsys):
    usual, kept = (ballast.plan("llama-8b", ranks=8, gpu="h200", activations=each) for each in (None, "kept"))
    assert kept.seconds < usual.seconds

    def faster(*flags):
        assert main(["plan", "llama-8b", *flags]) == 0
        return capsys.readouterr().out.partition("faster with one other setting (each was tried)\n")[2].splitlines()

    machine = ["--ranks", "8", "--gpu", "h200"]
    speed = f"{human_time(kept.seconds)} per step, {kept.tokens_per_second:,.0f} tokens/s"
    assert faster(*machine) == [f"  --activations kept: {speed}"]
    for amount in ("checkpointed", "kept"):
        assert not faster(*machine, "--activations", amount)
    assert not faster("--ranks", "8", "--gpu", "a100")
    small = ["--gpu", "rtx4090", "--host-memory", "128GiB", "--state-format", "compact"]
    backward, chunked = faster(*small)
    assert backward.startswith("  --update-in-backward: ") and chunked.startswith("  --loss-chunk 512: ")
    assert main(["plan", "llama-8b", *small, "--loss-chunk", "512", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [each.partition(":")[0] for each in answer["faster"]] == ["--update-in-backward"]
    assert f"{answer['plan']['tokens_per_second']:,.0f} tokens/s" in chunked


def test_a_tier_alone_means_all_activations():
    assert of_activations(plan("host")) == of_activations(plan("kept,host"))


def test_a_slow_lane_takes_time():
    fast = plan("host", rates={"download": "100GB/s", "upload": "100GB/s"})
    slow = plan("host", rates={"download": "5GB/s", "upload": "5GB/s"})
    moved = of_activations(slow)["host"]
    assert slow.seconds > fast.seconds
    assert slow.seconds >= moved / 5e9  # downloads and uploads overlap, at best
    drive = plan("nvme", rates={"read": "5GB/s", "write": "5GB/s"})
    assert drive.seconds >= 2 * moved / 5e9


def test_a_size_can_be_moved_too():
    found = of_activations(ballast.plan({"a": (512, 512), "b": (512, 512)}, activations="1GiB,host", host_memory="64GiB"))
    assert found["host"] == 1 << 30 and 0 < found["device"] <= 1 << 30


def test_the_timeline_shows_the_copies():
    kinds = {(entry.lane.name, entry.kind) for entry in plan("kept,nvme").timeline()}
    assert {("download", "download"), ("disk", "write"), ("disk", "read"), ("upload", "upload")} <= kinds


def test_too_little_room_in_the_tier_is_an_error():
    for activations, changes, words in (
        ("kept,host", {"host_memory": "16GiB"}, "host"),
        ("kept,nvme", {"drive_space": "16GiB"}, "nvme"),
    ):
        with pytest.raises(ballast.OutOfMemoryError, match="activations alone are more than a rank may keep") as raised:
            plan(activations, **changes)
        assert words in raised.value.needed


@pytest.mark.parametrize("value", ["kept,host,nvme", "host,kept", "kept,device", "kept, hots", "nvme,host", "host,host"])
def test_other_words_are_refused(value):
    with pytest.raises(ballast.UsageError, match="activations"):
        plan(value)


def test_offloaded_activations_are_suggested():
    for asked, suggested in (("kept", 'activations="kept,host":'), ("checkpointed", 'activations="checkpointed,host":')):
        needed = plan(asked, gpu_memory="1TiB", stage=3, offload={"state": "host", "gradients": "host", "parameters": "host"})
        with pytest.raises(ballast.OutOfMemoryError) as raised:
            plan(asked, gpu_memory=needed.bytes_in("device") - (1 << 20), stage=3,
                 offload={"state": "host", "gradients": "host", "parameters": "host"})
        assert suggested in raised.value.remedy


def test_activations_stay_on_the_device_where_their_tier_has_no_room(tmp_path):
    path = tmp_path / "bench.json"
    measured = {"device": "cpu", "memory": 1 << 38, "cores": 8, "flops": 1e12, "rates": {}}
    path.write_text(json.dumps({"ballast_bench": 1, "measured": measured}))
    for options in ({"measured": path}, {"gpu": "b200", "tokens": 2048, "stage": 3}):
        with pytest.raises(ballast.OutOfMemoryError, match="more than a rank may keep there") as raised:
            ballast.plan("llama-8b", activations="host", **options)
        assert 'activations="kept": ' in raised.value.remedy and "checkpointed,host" not in raised.value.remedy
        assert ballast.plan("llama-8b", activations="kept", **options).fits


def test_layers_of_all_micro_steps_read_parameters_once_and_keep_their_inputs():
    options = {"model": "qwen3-32b", "ranks": 1, "gpu": "4090", "host_memory": "112GiB", "gradient_format": "bf16"}
    options |= {"tokens": 2048, "micro_steps": 16}
    by_micro_steps, by_layers = (plan("checkpointed,host", layer_major=each, **options) for each in (False, True))
    assert of_activations(by_layers)["host"] == 16 * of_activations(by_micro_steps)["host"]
    assert by_layers.seconds < by_micro_steps.seconds / 2


def test_a_use_moves_the_activations_of_its_own_micro_step():
    options = {"ranks": 1, "gpu": "4090", "host_memory": "512GiB", "offload": "host", "tokens": 2048, "layer_major": True}
    few, many = (plan("checkpointed,host", micro_steps=count, **options) for count in (8, 64))
    assert many.seconds < 8 * few.seconds
