"""Tests with PEFT: two adapters, a module that is trained in full, files of adapters, and merging."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
from python.wrap.support.frameworks import tiny_model, without_compiler
from python.wrap.support.loops import keywords
from python.wrap.support.ranks import FRAMEWORKS, run_ranks
from safetensors.torch import load_file

if any(find_spec(name) is None for name in ("bitsandbytes", "peft", "transformers")):  # only the ranks import them
    pytest.skip("PEFT is not installed: .ci/bootstrap venv frameworks", allow_module_level=True)


Options = dict[str, Any] | None
WORDS = torch.arange(16).view(2, 8)


def two_adapters(bits: bool) -> Any:
    """Return a model with a trained head, and with two adapters. With `bits`, its layers are bitsandbytes' of 4 bits."""
    import peft

    model = tiny_model()
    if bits:
        in_four_bits(model)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(model, config, adapter_name="first")
    model.add_adapter("second", config)
    return model


def in_four_bits(model: torch.nn.Module) -> None:
    """Quantize the projections, as transformers' BitsAndBytesConfig does."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in ("q_proj", "v_proj"):
                layer = Linear4bit(child.in_features, child.out_features, bias=False, compute_dtype=torch.float32)
                layer.weight = Params4bit(child.weight.data.clone(), requires_grad=False, quant_type="nf4", module=layer)
                setattr(module, name, layer.to("cpu"))


def steps(model: Any, optimizer: torch.optim.Optimizer, adapter: str) -> list[float]:
    model.set_adapter(adapter)
    losses = []
    for _ in range(2):
        loss = model(input_ids=WORDS, labels=WORDS).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@without_compiler
def trained(options: Options, folder: Path, *, bits: bool = False) -> dict[str, Any]:
    """Train both adapters in turns, save them, and merge the last one."""
    model = two_adapters(bits)
    model.requires_grad_(False)
    model.set_adapter("second")
    model.set_adapter("first")  # freezes the other one, with its module
    adapters = [each for name, each in model.named_parameters() if ".first" in name or ".second" in name]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    if options is not None:
        optimizer = ballast.wrap(optimizer, model, **keywords(**options))
    result: dict[str, Any] = {"losses": [steps(model, optimizer, name) for name in ("first", "second", "first")]}
    if options is None:
        model.save_pretrained(folder)
    else:
        from ballast.integrations.peft import save_adapters

        save_adapters(model, folder)
        optimizer.close()
    merged = model.merge_and_unload()
    with torch.no_grad():
        result["merged"] = merged(input_ids=WORDS, labels=WORDS).loss.item()
    return result


def saved(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {name: load_file(folder / name / "adapter_model.safetensors") for name in ("first", "second")}


def of_ranks(rank: int, folder: str, every: list[tuple[Options, bool]]) -> list[dict[str, Any]]:
    """Return the results of all trainings. The first rank trains the plain ones."""
    return [
        trained(options, Path(folder) / str(number), bits=bits) if options is not None or rank == 0 else {}
        for number, (options, bits) in enumerate(every)
    ]


def of_deferred_base(rank: int, folder: str, every: list[tuple[Options, str]]) -> list[list[float]]:
    """Return the losses of trainings of adapters, with an evaluation first. Ballast reads the base where training begins; the
    adapters are made inside of `ballast.deferred()`, or outside. The base's matrices are large enough to be deferred."""
    import peft
    import transformers
    from ballast.integrations.transformers import from_pretrained

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, **sizes)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)  # the folder is that of rank 0
    torch.distributed.barrier()
    losses = []
    for options, where in every:
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=32, target_modules=["q_proj", "v_proj", "down_proj"])
        with ballast.deferred() if where == "inside" else nullcontext():
            kind = transformers.AutoModelForCausalLM
            base = kind.from_pretrained(folder) if options is None else from_pretrained(kind, folder)
            model: Any = peft.get_peft_model(base, lora)
        adapters = [each for each in model.parameters() if each.requires_grad]
        assert all(each.numel() > 1024 for each in adapters)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(adapters, lr=1e-2)
        if options is not None:
            optimizer = ballast.wrap(optimizer, model, **keywords(**options))
        with torch.no_grad():
            of_model = [model(input_ids=WORDS, labels=WORDS).loss.item()]
        losses.append(of_model + steps(model, optimizer, "default"))
    return losses


def test_adapters_train_in_turns_and_are_saved_alone(tmp_path):
    every = [(None, False), (None, True), ({"stage": 3}, False), ({"stage": 3}, True), ({"stage": 2}, True)]
    ranks = run_ranks(2, of_ranks, str(tmp_path), every, imported=FRAMEWORKS)
    for number, (options, bits) in enumerate(every):
        of_plain = every.index((None, bits))
        folder, plain = tmp_path / str(of_plain), ranks[0][of_plain]
        for rank in ranks if options is not None else ():
            losses = torch.tensor(rank[number]["losses"])
            torch.testing.assert_close(losses, torch.tensor(plain["losses"]), rtol=1e-4, atol=1e-5)
            assert rank[number]["merged"] == pytest.approx(plain["merged"], rel=1e-3)
        expected, found = saved(folder), saved(tmp_path / str(number))
        for name in expected:
            assert expected[name].keys() == found[name].keys()
            for key, values in expected[name].items():
                torch.testing.assert_close(values, found[name][key], rtol=1e-3, atol=1e-4)


def test_a_deferred_base_gets_adapters(tmp_path):
    every = [(None, ""), *(({"stage": stage}, where) for stage in (2, 3) for where in ("inside", "outside"))]
    for plain, *ours in run_ranks(2, of_deferred_base, str(tmp_path), every, imported=FRAMEWORKS):
        for losses in ours:
            assert losses == pytest.approx(plain, rel=1e-4)
