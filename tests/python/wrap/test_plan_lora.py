"""Tests that plan(lora=, base_format=) forecasts what wrap() compiles for adapters of PEFT over a frozen base."""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import Any

import ballast
import pytest
import torch
from python.wrap.support.forecast_programs import cpu_plan
from python.wrap.support.frameworks import without_compiler

peft = pytest.importorskip("peft", reason="peft is not installed: .ci/bootstrap venv frameworks")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: .ci/bootstrap venv frameworks")

RANK, LAYERS, HIDDEN = 4, 3, 64
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    **{"hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": LAYERS, "vocab_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
}
NVME = {"parameters": "nvme", "state": "nvme"}


class InFp8(torch.nn.Linear):
    """A frozen layer with a scale for all of its codes."""

    def __init__(self, plain: torch.nn.Linear):
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        scale = plain.weight.detach().abs().max().float() / 448
        self.weight = torch.nn.Parameter((plain.weight.detach() / scale).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


def in_nf4(plain: torch.nn.Linear) -> torch.nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="it is not installed: .ci/bootstrap venv frameworks")
    options = {"bias": False, "compute_dtype": torch.bfloat16, "quant_type": "nf4"}
    layer = bitsandbytes.nn.Linear4bit(plain.in_features, plain.out_features, **options)
    layer.weight = bitsandbytes.nn.Params4bit(plain.weight.detach(), requires_grad=False, quant_type="nf4")
    return layer.to("cpu")


def adapted(base_format: str) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**CONFIG), dtype=torch.bfloat16)
    layer = {"nf4": in_nf4, "fp8": InFp8, "bf16": lambda plain: plain}[base_format]
    for block in model.model.layers:
        for module in [*block.modules()]:
            for name, below in [*module.named_children()]:
                if type(below) is torch.nn.Linear:
                    setattr(module, name, layer(below))
    model.is_loaded_in_4bit = base_format == "nf4"
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear"))


def wrapped_as_planned(plan: Any, model: Any, folder: Any) -> Any:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    call = plan.wrap_call().replace("DIRECTORY", str(folder))
    return eval(call, {"ballast": ballast, "model": model, "optimizer": optimizer})


def step(model: Any, optimizer: Any) -> None:
    words = torch.arange(32).view(2, 16)
    model(input_ids=words, labels=words, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def sizes(model: Any) -> list[tuple[str, int, int]]:
    """Return the format of each unit, and its elements that are trained and frozen."""
    elements = lambda unit, is_frozen: sum(tensor.elements for tensor in unit.tensors if tensor.frozen == is_frozen)
    return [(unit.dtype.name, elements(unit, False), elements(unit, True)) for unit in model.units]


@without_compiler
@pytest.mark.parametrize("offload", [{}, NVME], ids=["device", "drive"])
@pytest.mark.parametrize("base_format", ["nf4", "fp8", "bf16"])
def test_the_program_of_adapters_is_the_planned_one(base_format, offload, tmp_path):
    from ballast.torch.parameters.units import first_trace, model_of

    options = {"stage": 3, "offload": offload, "drive_space": "1TiB", **cpu_plan(tmp_path / "measured.json")}
    plan = ballast.plan(CONFIG, lora=RANK, base_format=base_format, **options)
    model = adapted(base_format)
    optimizer = wrapped_as_planned(plan, model, tmp_path)
    partition = optimizer._ballast.partition_now()
    question = copy.copy(plan._question)
    assert sizes(question.model) == sizes(model_of(partition.units))
    question.set_rule(partition._rules[0])
    question.set_work([(0.0, 0.0)] * len(partition.units))
    question.trace = first_trace(partition.units, question.model, 3)
    assert question.program(plan._placement, rank=0) == partition.core.program()
    step(model, optimizer)
    assert optimizer.metrics()["memory_bytes/nvme"] == sum(plan.memory["nvme"].values())
    optimizer.close()


@without_compiler
@pytest.mark.parametrize("base_format", ["nf4", "bf16"])
def test_the_base_is_read_once_for_recomputation_and_backward(base_format, tmp_path, caplog):
    """A block has units of two or three formats, which its modules use in turns. None is in use while another one is opened."""
    model = adapted(base_format)
    offload = {kind: f"nvme:{tmp_path}" for kind in NVME}
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    optimizer = ballast.wrap(optimizer, model, stage=3, offload=offload, tuning=ballast.Tuning(timeline=True))
    before, reads = Counter[str](), []
    for _ in range(5):
        step(model, optimizer)
        optimizer.write_timeline(tmp_path / "timeline.json")
        names = [event["name"] for event in json.loads((tmp_path / "timeline.json").read_text())]
        found = Counter(name for name in names if name.startswith("read_first") and "layers" in name)
        reads.append(found - before)
        before = found
    optimizer.close()
    assert all(len(each) == LAYERS * (3 if base_format == "nf4" else 2) for each in reads)
    assert max(reads[-1].values()) <= 2  # one in forward, one in backward
    base = [[count for name, count in each.items() if "base_layer" in name] for each in reads]
    # No program knows the order in the first two steps, so units stay while there is room. What the entry has read is in vain.
    assert all(max(each) <= 4 and sum(each) <= 3.4 * len(each) for each in base[:2])
    assert not [each for each in caplog.records if each.name == "ballast"]


def test_a_smaller_format_takes_less_of_the_drive_and_of_the_time():
    options = {"lora": 16, "gpu": "rtx4090", "host_memory": "32GiB", "drive_space": "1TB", "tokens": 4096, "offload": NVME}
    plans = [ballast.plan("llama-70b", base_format=each, **options) for each in ("nf4", "fp8", "bf16")]
    assert [round(plan.memory["nvme"]["frozen"] / 1e9) for plan in plans] == [39, 73, 142]
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    added = 80 * 16 * (4 * 8192 + 2 * (8192 + 1024) + 3 * (8192 + 28672))
    assert {plan.parameters for plan in plans} == {70_553_706_496 + added}
    for plan in plans:
        assert any("adapters of rank 16" in note and "207 million" in note for note in plan.notes)
        assert not any("TF32" in note for note in plan.notes)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"base_format": "nf4"}, "base_format"),
        ({"base_format": "int3", "lora": 4}, 'there is no base_format "int3"'),
        ({"lora": 0}, "lora"),
    ],
)
def test_bad_adapters_are_refused(options, message):
    with pytest.raises(ballast.UsageError, match=f"B1001(.|\n)*{message}"):
        ballast.plan(CONFIG, **options)


def test_adapters_are_not_added_twice():
    with pytest.raises(ballast.UsageError, match="B1001 lora adds adapters(.|\n)*frozen ones"):
        ballast.plan(adapted("bf16"), lora=4)
