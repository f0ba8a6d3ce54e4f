"""Configurations of DeepSpeed: every key is either carried over, or named."""

import json

import ballast
import pytest
from ballast.deepspeed_config import REASONS, import_deepspeed

TYPICAL = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch", "pin_memory": True, "buffer_count": 4},
        "offload_param": {"device": "nvme", "nvme_path": "/scratch", "max_in_cpu": 1e9},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "aio": {"block_size": 262144, "queue_depth": 32},
    "flops_profiler": {"enabled": False, "detailed": True},
    "some_new_thing": {"rate": 3},
}


def test_a_typical_one():
    imported = import_deepspeed(TYPICAL)
    place = "nvme:/scratch"
    assert imported.options == {
        "stage": 3,
        "offload": {"state": place, "gradients": "host", "parameters": place},
        "max_grad_norm": 1.0,
    }
    said = "\n".join(imported.to_do)
    for words in (
        "torch.optim.AdamW(model.parameters(), lr=0.0003, betas=[0.9, 0.95], eps=1e-08, weight_decay=0.1)",
        "bfloat16",
        "batches of 4",
        "8 times before each step()",
        "WarmupLR",
    ):
        assert words in said
    assert "float16, and" not in said
    assert set(imported.left_out) == {
        "steps_per_print",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_optimizer.buffer_count",
        "zero_optimization.offload_param.max_in_cpu",
        "zero_optimization.overlap_comm",
        "zero_optimization.sub_group_size",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "aio.block_size",
        "aio.queue_depth",
        "some_new_thing.rate",
    }
    assert imported.left_out["some_new_thing.rate"] == "nothing here does this"
    assert "ballast.export" in imported.text() and "stage=3" in imported.text()


def test_a_file_and_a_dictionary_are_the_same(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(TYPICAL))
    assert ballast.import_deepspeed(tmp_path / "ds.json") == ballast.import_deepspeed(TYPICAL)


@pytest.mark.parametrize(
    ("zero", "options"),
    [
        ({}, {"stage": 0}),
        ({"stage": 1}, {"stage": 1}),
        ({"stage": 2, "cpu_offload": True}, {"stage": 2, "offload": {"state": "host", "gradients": "host"}}),
        ({"stage": 2, "offload_optimizer": {"device": "none"}}, {"stage": 2}),
        ({"stage": 3, "offload_param": {"device": "none"}}, {"stage": 3}),
    ],
)
def test_stages_and_places(zero, options):
    imported = import_deepspeed({"zero_optimization": zero})
    assert (imported.options, imported.to_do, imported.left_out) == (options, [], {})


def test_parameters_do_not_lie_farther_than_their_state():
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    imported = import_deepspeed({"zero_optimization": zero})
    assert imported.options["offload"] == {"state": "host", "gradients": "host", "parameters": "host"}
    assert "on the device: here both" in imported.to_do[0]


def test_what_is_left_to_others_is_left_out_in_silence():
    imported = import_deepspeed(
        {
            "train_batch_size": "auto",
            "gradient_clipping": "auto",
            "optimizer": {"type": "Adam", "params": {"lr": "auto", "adam_w_mode": True}},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "round_robin_gradients": False},
        }
    )
    assert imported.options == {"stage": 2}
    assert imported.to_do == ["make the optimizer: torch.optim.AdamW(model.parameters(), weight_decay=0.0)"]
    assert imported.left_out == {}


@pytest.mark.parametrize(
    ("optimizer", "made"),
    [
        ({"type": "AdamW"}, "torch.optim.AdamW(model.parameters(), weight_decay=0.0)"),
        ({"type": "AdamW", "params": {"lr": 1, "adam_w_mode": False}}, "AdamW(model.parameters(), lr=1, weight_decay=0.0)"),
        ({"type": "Adam", "params": {"torch_adam": True}}, "torch.optim.AdamW(model.parameters(), weight_decay=0.0)"),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "torch.optim.Adam(model.parameters())"),
        ({"type": "SGD", "params": {"lr": 0.1}}, "torch.optim.SGD(model.parameters(), lr=0.1)"),
        ({"type": "Lion", "params": {"lr": 0.1}}, "Lion(model.parameters(), lr=0.1, betas=(0.9, 0.999))"),
    ],
)
def test_optimizers_have_the_numbers_that_deepspeed_gives_them(optimizer, made):
    imported = import_deepspeed({"optimizer": optimizer})
    assert imported.to_do[0].endswith(made)
    assert imported.left_out == {}


def test_what_deepspeeds_optimizers_do_and_torchs_do_not_is_named():
    imported = import_deepspeed({"optimizer": {"type": "Adam", "params": {"bias_correction": False, "freeze_step": 9}}})
    assert set(imported.left_out) == {"optimizer.params.bias_correction", "optimizer.params.freeze_step"}


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        (
            {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4},
            [
                "load batches of 4 on each rank",
                "call backward() 64 / ranks times before each step(), of losses divided by that number",
            ],
        ),
        ({"train_batch_size": 256, "gradient_accumulation_steps": 1}, ["load batches of 256 / ranks / 1 on each rank"]),
        ({"train_batch_size": 256}, ["load batches of 256 / ranks on each rank"]),
        ({"train_micro_batch_size_per_gpu": 4}, ["load batches of 4 on each rank"]),
    ],
)
def test_what_is_not_said_of_batches_follows(batches, said):
    assert import_deepspeed(batches).to_do == said


@pytest.mark.parametrize(
    ("fp16", "scaler"),
    [
        ({}, "(init_scale=65536.0, growth_interval=1000)"),
        ({"loss_scale": 0, "initial_scale_power": 12}, "(init_scale=4096.0, growth_interval=1000)"),
        ({"loss_scale_window": 500}, "(init_scale=65536.0, growth_interval=500)"),
        ({"loss_scale": 128, "loss_scale_window": 500}, "(init_scale=128.0, growth_interval=1000000000), which halves"),
    ],
)
def test_fp16_needs_a_scaler(fp16, scaler):
    imported = import_deepspeed({"fp16": {"enabled": True, **fp16}})
    assert f"torch.amp.GradScaler{scaler}" in imported.to_do[0]
    assert imported.left_out == {}


def test_what_a_scaler_does_not_do_is_named():
    rest = {"hysteresis": 2, "min_loss_scale": 1, "consecutive_hysteresis": True, "auto_cast": True}
    imported = import_deepspeed({"fp16": {"enabled": True, **rest}})
    assert set(imported.left_out) == {f"fp16.{key}" for key in rest}
    assert "GradScaler" in imported.left_out["fp16.hysteresis"]
    open_yet = import_deepspeed({"fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2}})
    assert set(open_yet.left_out) == {"fp16.loss_scale", "fp16.hysteresis"}


def test_what_cannot_be_switched_off_is_named():
    zero = {"stage": 2, "overlap_comm": False, "contiguous_gradients": False, "round_robin_gradients": False}
    imported = import_deepspeed({"zero_optimization": zero, "bf16": {"enabled": True, "check_grad_overflow": False}})
    assert imported.left_out == {
        "bf16.check_grad_overflow": "always so here",
        "zero_optimization.overlap_comm": "always so here",
        "zero_optimization.contiguous_gradients": "always so here",
    }


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_optimization": {"stage": 4}}, "0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "disk"}}}, "cpu, nvme"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}, "nvme_path"),
        ({"optimizer": {"type": "OneBitAdam"}}, "OneBitAdam"),
        ("nowhere.json", "nowhere.json"),
    ],
)
def test_what_cannot_be_is_refused(config, said):
    with pytest.raises(ballast.UsageError, match=f"B1001(.|\n)*{said}"):
        import_deepspeed(config)


def test_reasons_are_sentences_of_their_own():
    assert all(reason and not reason.endswith(".") for reason in REASONS.values())


def test_the_options_are_those_of_wrap(tmp_path):
    pytest.importorskip("torch")
    from ballast.wrapper import options

    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    imported = import_deepspeed({"zero_optimization": zero, "gradient_clipping": 0.5})
    assert options.read(imported.options).stage == 3
