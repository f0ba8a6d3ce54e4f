"""Tests of frozen parameters in formats of other libraries: stage 3 partitions and gathers their bytes as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
from python.wrap.support.frameworks import without_compiler
from python.wrap.support.loops import keywords
from python.wrap.support.ranks import FRAMEWORKS, run_ranks
from safetensors.torch import load_file
from torch.testing._internal.two_tensor import TwoTensor  # a class that keeps its values in other tensors

Options = dict[str, Any] | None  # the options of ballast.wrap(); None: torch alone


class Quantized(torch.nn.Module):
    """A frozen layer of 8-bit codes with scales in another 8-bit format. Its shapes are odd."""

    def __init__(self, width: int, seed: int):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 256, (width, width), dtype=torch.uint8, generator=random)
        signs = torch.randint(-1, 2, (width,), dtype=torch.int8, generator=random)
        scales = (torch.rand(width, generator=random) + 0.5).to(torch.float8_e4m3fn)
        self.codes = torch.nn.Parameter(codes, requires_grad=False)
        self.signs = torch.nn.Parameter(signs, requires_grad=False)
        self.scales = torch.nn.Parameter(scales, requires_grad=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        weight = (self.codes.float() / 128 - 1) * self.scales.float()[:, None]
        return torch.nn.functional.linear(batch, weight * 0.1, self.signs.float())


def in_four_bits(width: int, seed: int, **options: Any) -> torch.nn.Module:
    """Return a layer of bitsandbytes, which keeps a view of its weight for backward."""
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(seed)
    layer = Linear4bit(width, width, bias=False, compute_dtype=torch.float32, quant_type="nf4", **options)
    layer.support_avx512bf16_for_cpu = False  # an evaluation would pack the weight in another way, and not an odd one
    return layer


def in_bfloat16_storage(width: int, seed: int) -> torch.nn.Module:
    """Return a layer whose codes of 4 bits are in a parameter of bfloat16, and whose scales have scales."""
    return in_four_bits(width, seed, quant_storage=torch.bfloat16, compress_statistics=True)


class Adapted(torch.nn.Module):
    def __init__(self, base: torch.nn.Module, width: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Linear(width, 3, bias=False)
        self.up = torch.nn.Linear(3, width)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(batch) + self.up(self.down(batch)))


Layer = Callable[[int, int], torch.nn.Module]


def width_of(layer: Layer) -> int:
    return 38 if layer is in_bfloat16_storage else 37  # pairs of bytes have no odd number


def model_of(layer: Layer) -> torch.nn.Module:
    width = width_of(layer)
    blocks = [Adapted(layer(width, seed), width) for seed in range(3)]
    torch.manual_seed(0)
    for block in blocks:
        block.down.reset_parameters()
        block.up.reset_parameters()
    return torch.nn.Sequential(*blocks).to("cpu")  # bitsandbytes quantizes in to()


def wrapped(model: torch.nn.Module, options: Options) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    return optimizer if options is None else ballast.wrap(optimizer, model, **keywords(**options))


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> list[float]:
    losses = []
    for number in range(count):
        batch = torch.randn(4, model[0].down.in_features, generator=torch.Generator().manual_seed(number))
        loss = (model(batch) - 0.5).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def frozen(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the bytes of the packed parameters, which torch has now."""
    plain = {name: each.detach().as_subclass(torch.Tensor) for name, each in model.named_parameters() if ".base." in name}
    return {name: each.contiguous().flatten().view(torch.uint8).clone() for name, each in plain.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def kept_bytes(optimizer: Any) -> int:
    """Return the bytes of packed parameters that this rank keeps."""
    partition = optimizer._ballast.partition_now()
    parts = partition.core.local_shards()
    return sum(part.count for part in parts if partition.member_of(part).is_opaque)


@without_compiler
def trained(layer: Layer, options: Options) -> dict[str, Any]:
    """Train, and report the losses and whether the frozen bytes are the same in every place."""
    model = model_of(layer)
    for module in model.modules() if options is None else ():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # it rounds in evaluations on some CPUs, and refuses odd shapes
    before = frozen(model)
    optimizer = wrapped(model, options)
    result: dict[str, Any] = {"losses": steps(model, optimizer), "bytes": sum(len(each) for each in before.values())}
    with torch.no_grad():
        result["evaluated"] = model.eval()(torch.ones(2, width_of(layer))).sum().item()
    model.train()
    if options is None:
        return result
    result["kept"] = kept_bytes(optimizer)
    with ballast.gather(model):
        result["gathered"] = equal(before, frozen(model))
    model[1].up.bias.requires_grad_(False)  # another plan
    steps(model, optimizer, 1)
    with ballast.gather(model):
        result["moved"] = equal(before, frozen(model))
    optimizer.close()
    result["closed"] = equal(before, frozen(model))
    result["kinds"] = [type(each).__name__ for each in model[0].parameters()]
    return result


def trainings(_: int, layers: list[Layer], every: list[Options]) -> list[list[dict[str, Any]]]:
    return [[trained(layer, options) for options in every] for layer in layers]


def files_of(_: int, layers: Sequence[Layer], folder: str) -> list[dict[str, bool]]:
    return [files(layer, f"{folder}/{layer.__name__}") for layer in layers]


@without_compiler
def files(layer: Layer, folder: str) -> dict[str, bool]:
    """Save, load and export on these ranks. Return whether the frozen bytes survive."""
    Path(folder).mkdir(exist_ok=True)
    model = model_of(layer)
    before = frozen(model)
    optimizer = wrapped(model, {"stage": 3})
    steps(model, optimizer, 1)
    ballast.save(f"{folder}/saved", model, optimizer)
    ballast.export(model, f"{folder}/model.safetensors")
    optimizer.close()
    result: dict[str, bool] = {}
    for stage in (2, 3):
        result[f"loaded at {stage}"] = equal(before, loaded(layer, f"{folder}/saved", {"stage": stage}))
    exported = load_file(f"{folder}/model.safetensors")
    result["exported"] = all(torch.equal(exported[name].flatten().view(torch.uint8), each) for name, each in before.items())
    result["read"] = equal(before, loaded(layer, f"{folder}/model.safetensors", {"stage": 3}))
    return result


@without_compiler
def loaded(layer: Layer, path: str, options: Options) -> dict[str, torch.Tensor]:
    """Return the frozen bytes of a model that began with zeros, after it has loaded a checkpoint or files."""
    model = model_of(layer)
    for parameter in model.parameters():
        parameter.data.zero_()
    optimizer = wrapped(model, options)
    if Path(path).is_dir():
        ballast.load_checkpoint(path, model, optimizer)
    else:
        ballast.load(model, path)
    steps(model, optimizer, 1)
    with ballast.gather(model):
        found = frozen(model)
    optimizer.close()
    return found


if find_spec("bitsandbytes") is None:  # its import takes a second
    pytest.skip("bitsandbytes is not installed: .ci/bootstrap venv frameworks", allow_module_level=True)

LAYERS = [Quantized, in_four_bits, in_bfloat16_storage]


def configurations(folder):
    drive = {"parameters": f"nvme:{folder}", "state": f"nvme:{folder}"}
    return [{"stage": 3}, {"stage": 3, "offload": "host"}, {"stage": 3, "offload": drive}]


def test_adapters_over_packed_parameters_train_as_with_torch(tmp_path):
    """Packed parameters keep their bits on each rank, in every tier, in another plan, and at the end."""
    every = [*configurations(tmp_path), {"stage": 3, "wire": {"gather": "int8"}}]
    ranks = run_ranks(2, trainings, LAYERS, every, imported=FRAMEWORKS)
    for number, layer in enumerate(LAYERS):
        plain = trained(layer, None)
        for rank in ranks:
            for options, result in zip(every, rank[number]):
                assert result["gathered"] and result["moved"] and result["closed"], (layer, options)
                if "wire" not in options:
                    assert result["losses"] == pytest.approx(plain["losses"], rel=1e-4), (layer, options)
                    assert result["evaluated"] == pytest.approx(plain["evaluated"], rel=1e-3), (layer, options)
        kept = [rank[number][0]["kept"] for rank in ranks]
        assert sum(kept) == plain["bytes"]
        assert max(kept) < plain["bytes"]
    assert ranks[0][1][0]["kinds"][0] == "Params4bit"


def test_packed_parameters_in_checkpoints_and_files(tmp_path):
    layers = (Quantized, in_bfloat16_storage)
    for results in run_ranks(2, files_of, layers, str(tmp_path), imported=FRAMEWORKS):
        assert all(all(result.values()) for result in results), results
    for layer in layers:
        folder = tmp_path / layer.__name__
        assert equal(frozen(model_of(layer)), loaded(layer, f"{folder}/saved", {"stage": 3}))


def test_what_cannot_be_partitioned_is_named():
    weight = torch.nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn))
    with pytest.raises(ballast.Error, match=r"B1005 cannot partition a parameter: it holds torch.float8_e4m3fn"):
        ballast.wrap(torch.optim.SGD([weight]))
    model = model_of(Quantized)
    model[1].base.codes = torch.nn.Parameter(TwoTensor(torch.zeros(3), torch.zeros(3)), requires_grad=False)
    optimizer = wrapped(model, {"stage": 3})
    with pytest.raises(ballast.Error, match=r"B1005 cannot partition a parameter: it is a TwoTensor(.|\n)*1.base.codes"):
        steps(model, optimizer)
    optimizer.close()


def test_attributes_of_bitsandbytes():
    """Stage 3 sets one of them, and looks for the class of the other."""
    import bitsandbytes

    layer = in_four_bits(8, 0)
    assert hasattr(layer, "support_avx512bf16_for_cpu")
    assert bitsandbytes.nn.Int8Params.__name__ == "Int8Params"


def test_modules_that_keep_a_copy_of_their_weights_are_named(caplog):
    import bitsandbytes

    model = torch.nn.Sequential(bitsandbytes.nn.Linear8bitLt(16, 16, has_fp16_weights=False), torch.nn.Linear(16, 2)).to("cpu")
    optimizer = ballast.wrap(torch.optim.AdamW(model[1].parameters()), model, stage=3)
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    optimizer.close()
    assert "module 0 keeps a full copy of its 8-bit weights" in caplog.text
