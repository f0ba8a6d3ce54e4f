"""Tests of import_deepspeed(): every key of a configuration is carried over or named."""

import json

import ballast
import pytest
from ballast.deepspeed_config import OTHER, import_deepspeed

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


KINDS = ("state", "gradients", "parameters")


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
    assert imported.left_out["some_new_thing.rate"] == imported.left_out["aio.block_size"] == OTHER
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
        ({"stage": 3, "offload_param": {"device": "none", "nvme_path": None}, "offload_optimizer": None}, {"stage": 3}),
        ({"stage": 3, "cpu_offload": True, "cpu_offload_param": True}, {"stage": 3, "offload": dict.fromkeys(KINDS, "host")}),
        (False, {"stage": 0}),
        (True, {"stage": 1}),
    ],
)
def test_stages_and_tiers(zero, options):
    imported = import_deepspeed({"zero_optimization": zero, "gradient_clipping": 0})
    assert (imported.options, imported.to_do, imported.left_out) == (options, [], {})


def test_parameters_are_not_on_a_slower_tier_than_their_state():
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    imported = import_deepspeed({"zero_optimization": zero})
    assert imported.options["offload"] == {"state": "host", "gradients": "host", "parameters": "host"}
    assert "on the device: here both" in imported.to_do[0]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {"stage": 0, "max_grad_norm": 1.0}),
        ({"zero_optimization": {"stage": 2}}, {"stage": 2, "max_grad_norm": 1.0}),
        ({"gradient_clipping": 0.5}, {"stage": 0, "max_grad_norm": 0.5}),
        ({"gradient_clipping": 0}, {"stage": 0}),
        ({"gradient_clipping": -1.0}, {"stage": 0}),
    ],
)
def test_gradients_are_clipped_as_deepspeed_clips_them(config, options):
    assert import_deepspeed(config).options == options


AUTO_OF_THE_SCRIPT = {
    "gradient_clipping": "pass max_grad_norm=... to wrap()",
    "train_batch_size": "the batch of all ranks",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "TrainingArguments.gradient_accumulation_steps",
    "bf16.enabled": "bfloat16",
    "bfloat16.enabled": "bfloat16",
    "fp16.enabled": "float16",
    "optimizer.type": "the optimizer",
    "scheduler.type": "scheduler",
}


def nested(path, value):
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


@pytest.mark.parametrize("key", AUTO_OF_THE_SCRIPT)
def test_auto_is_a_choice_that_the_script_has_to_make(key):
    imported = import_deepspeed({"gradient_clipping": 0, **nested(key, "auto")})
    assert [each.partition(":")[0] for each in imported.to_do] == [f'{key} is "auto"']
    assert AUTO_OF_THE_SCRIPT[key] in imported.to_do[0]
    assert (imported.options, imported.left_out) == ({"stage": 0}, {})


@pytest.mark.parametrize("section", ["bf16", "fp16"])
def test_a_section_that_is_auto_is_as_its_switch(section):
    assert import_deepspeed({section: "auto"}) == import_deepspeed({section: {"enabled": "auto"}})


@pytest.mark.parametrize(
    ("zero", "key"),
    [
        ({"stage": "auto"}, "stage"),
        ("auto", "stage"),
        ({"stage": 2, "offload_optimizer": {"device": "auto"}}, "offload_optimizer.device"),
        ({"stage": 2, "offload_optimizer": "auto"}, "offload_optimizer.device"),
        ({"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "auto"}}, "offload_optimizer.nvme_path"),
        ({"stage": 3, "offload_param": {"device": "auto"}}, "offload_param.device"),
        ({"stage": 3, "cpu_offload": "auto"}, "cpu_offload"),
    ],
)
def test_a_stage_or_a_tier_that_is_auto_is_refused(zero, key):
    with pytest.raises(ballast.UsageError, match=f'B1001 cannot import zero_optimization.{key}: it is "auto"'):
        import_deepspeed({"zero_optimization": zero})


def test_a_configuration_of_hugging_face_lists_all_open_choices():
    params = {"lr": "auto", "betas": "auto", "eps": 1e-6, "weight_decay": "auto"}
    imported = import_deepspeed(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "optimizer": {"type": "Adam", "params": {**params, "adam_w_mode": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_min_lr": 0}},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "round_robin_gradients": False},
        }
    )
    assert imported.options == {"stage": 2}
    assert [each.partition(" is ")[0] for each in imported.to_do if ' is "auto": ' in each] == [
        "gradient_clipping",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "optimizer.params.weight_decay",
        "train_batch_size",
        "gradient_accumulation_steps",
        "scheduler.params.warmup_num_steps",
    ]
    assert [each for each in imported.to_do if ' is "auto": ' not in each] == [
        "make the optimizer: torch.optim.AdamW(model.parameters(), lr=..., betas=..., eps=1e-06, weight_decay=...)",
        "load batches of 4 on each rank",
        "make the learning rate scheduler yourself, from torch.optim.lr_scheduler: "
        "DeepSpeed's is WarmupLR(warmup_num_steps=..., warmup_min_lr=0)",
    ]
    assert set(imported.left_out) == {"zero_optimization.reduce_bucket_size", "zero_optimization.round_robin_gradients"}


@pytest.mark.parametrize(
    ("config", "left_out"),
    [
        ({"flops_profiler": {"enabled": True}}, ["flops_profiler.enabled"]),
        ({"flops_profiler": {"enabled": "auto", "detailed": False}}, ["flops_profiler.enabled", "flops_profiler.detailed"]),
        ({"tensorboard": {"enabled": True, "output_path": "log"}}, ["tensorboard.enabled", "tensorboard.output_path"]),
        ({"tensorboard": {"enabled": False, "output_path": "log"}}, []),
        ({"timers": {"throughput": {"enabled": True}}}, ["timers.throughput.enabled"]),
        (
            {"prescale_gradients": False, "zero_optimization": {"round_robin_gradients": False}},
            ["prescale_gradients", "zero_optimization.round_robin_gradients"],
        ),
        ({"managed_gradient_accumulation": False}, ["managed_gradient_accumulation"]),
        ({"gradient_allreduce_op": "sum"}, ["gradient_allreduce_op"]),
        ({"amp": {"enabled": True}}, ["amp.enabled"]),
        ({"optimizer": {"type": "Lion", "params": {"eps": 1e-8}}}, ["optimizer.params.eps"]),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, ["optimizer.params.max_grad_norm"]),
        ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, ["bfloat16.enabled"]),
    ],
)
def test_dropped_keys_are_named(config, left_out):
    assert list(import_deepspeed(config).left_out) == left_out


@pytest.mark.parametrize(
    "key",
    [
        "no_such_switch",
        "no_such_section.enabled",
        "zero_optimization.stages",
        "zero_optimization.offload_optimizer.no_such_key",
        "zero_optimization.enabled",
        "bf16.no_such_key",
        "optimizer.no_such_key",
    ],
)
@pytest.mark.parametrize("value", [False, "auto", {}, 3])
def test_an_unknown_key_is_named_whatever_its_value(key, value):
    imported = import_deepspeed({**nested(key, value), "bf16": {"enabled": False, **nested(key, value).get("bf16", {})}})
    assert imported.left_out == {key: OTHER}


@pytest.mark.parametrize("section", ["offload_optimizer", "offload_param"])
def test_nested_keys_of_offload_are_named(section):
    rest = {"pin_memory": False, "buffer_count": 4, "nvme_path": "/scratch"}
    rest |= {"ratio": 0.5, "super_offload": True} if section == "offload_optimizer" else {"max_in_cpu": 0, "buffer_size": 9}
    imported = import_deepspeed({"zero_optimization": {"stage": 3, section: {"device": "cpu", **rest}}})
    assert set(imported.left_out) == {f"zero_optimization.{section}.{key}" for key in rest}
    assert imported.left_out[f"zero_optimization.{section}.nvme_path"] == "the device is not nvme"


def test_parameters_are_not_offloaded_below_stage_3():
    imported = import_deepspeed({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})
    assert imported.left_out == {"zero_optimization.offload_param.device": "parameters are partitioned in stage 3 only"}


def test_buffers_stay_as_they_are():
    for section, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        said = "\n".join(import_deepspeed({section: {"enabled": True}}).to_do)
        assert f"p.data = p.data.to(torch.{dtype})" in said and "model.to(" not in said


@pytest.mark.parametrize(
    ("optimizer", "made"),
    [
        ({"type": "AdamW"}, "torch.optim.AdamW(model.parameters(), weight_decay=0.0)"),
        ({"type": "AdamW", "params": {"lr": 1, "adam_w_mode": False}}, "AdamW(model.parameters(), lr=1, weight_decay=0.0)"),
        ({"type": "Adam", "params": {"torch_adam": True}}, "torch.optim.AdamW(model.parameters())"),
        ({"type": "Adam", "params": {"torch_adam": False}}, "torch.optim.AdamW(model.parameters(), weight_decay=0.0)"),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "torch.optim.Adam(model.parameters())"),
        ({"type": "SGD", "params": {"lr": 0.1}}, "torch.optim.SGD(model.parameters(), lr=0.1)"),
        ({"type": "Lion", "params": {"lr": 0.1}}, "Lion(model.parameters(), lr=0.1, betas=(0.9, 0.999))"),
    ],
)
def test_optimizers_have_the_values_that_deepspeed_gives_them(optimizer, made):
    imported = import_deepspeed({"optimizer": optimizer})
    assert imported.to_do[0].endswith(made)
    assert imported.left_out == {}


def test_options_that_torchs_optimizers_lack_are_named():
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
def test_missing_batch_sizes_follow_from_the_others(batches, said):
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


def test_options_that_a_scaler_lacks_are_named():
    rest = {"hysteresis": 2, "min_loss_scale": 1, "consecutive_hysteresis": True, "auto_cast": True}
    imported = import_deepspeed({"fp16": {"enabled": True, **rest}})
    assert set(imported.left_out) == {f"fp16.{key}" for key in rest}
    assert "GradScaler" in imported.left_out["fp16.hysteresis"]
    open_yet = import_deepspeed({"fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2}})
    assert set(open_yet.left_out) == {"fp16.loss_scale", "fp16.hysteresis"}


def test_features_that_cannot_be_switched_off_are_named():
    zero = {"stage": 2, "overlap_comm": False, "contiguous_gradients": False, "round_robin_gradients": False}
    imported = import_deepspeed({"zero_optimization": zero, "bf16": {"enabled": True, "check_grad_overflow": False}})
    assert imported.left_out == {
        "bf16.check_grad_overflow": "always on in Ballast",
        "zero_optimization.overlap_comm": "always on in Ballast",
        "zero_optimization.contiguous_gradients": "always on in Ballast",
        "zero_optimization.round_robin_gradients": OTHER,
    }


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_optimization": {"stage": 4}}, "0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "disk"}}}, "cpu, nvme"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}, "nvme_path"),
        ({"zero_optimization": {"stage": True}}, "0, 1, 2 or 3"),
        ({"optimizer": {"type": "OneBitAdam"}}, "OneBitAdam"),
        ({"optimizer": "AdamW"}, "section of keys"),
        ({"gradient_clipping": None}, "a number"),
        ({"gradient_clipping": "1.0"}, "a number"),
        ({"gradient_clipping": True}, "a number"),
        ({"bf16": {"enabled": "yes"}}, "true or false"),
        ({"train_batch_size": 2.5}, "whole number from 1"),
        ({"gradient_accumulation_steps": 0}, "whole number from 1"),
        ({"fp16": {"enabled": True, "loss_scale": "big"}}, "a number"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both are enabled"),
        ("nowhere.json", "nowhere.json"),
    ],
)
def test_impossible_configurations_are_refused(config, said):
    with pytest.raises(ballast.UsageError, match=f"B1001(.|\n)*{said}"):
        import_deepspeed(config)


def test_a_key_that_a_file_has_twice_is_refused(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1, "stage": 3}}')
    with pytest.raises(ballast.UsageError, match='names "stage" twice'):
        import_deepspeed(tmp_path / "ds.json")


def test_the_options_are_those_of_wrap(tmp_path):
    torch = pytest.importorskip("torch")
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    imported = import_deepspeed({"zero_optimization": zero, "gradient_clipping": 0.5})
    model = torch.nn.Linear(4, 4)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, **imported.options)
    assert optimizer._ballast.options.stage == 3
    assert optimizer._ballast.options.max_grad_norm == 0.5
