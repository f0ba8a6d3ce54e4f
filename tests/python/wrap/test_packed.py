"""Tests of frozen parameters in formats of other libraries: stage 3 partitions and gathers their bytes as they are."""

from importlib.util import find_spec

import ballast
import pytest
import torch
from python.wrap.support import packed
from python.wrap.support.ranks import FRAMEWORKS, run_ranks
from torch.testing._internal.two_tensor import TwoTensor  # a class that keeps its values in other tensors

if find_spec("bitsandbytes") is None:  # its import takes a second
    pytest.skip("bitsandbytes is not installed: .ci/bootstrap venv frameworks", allow_module_level=True)

LAYERS = [packed.Quantized, packed.in_four_bits, packed.in_bfloat16_storage]


def configurations(folder):
    drive = {"parameters": f"nvme:{folder}", "state": f"nvme:{folder}"}
    return [{"stage": 3}, {"stage": 3, "offload": "host"}, {"stage": 3, "offload": drive}]


def test_adapters_over_packed_parameters_train_as_with_torch(tmp_path):
    """Packed parameters keep their bits on each rank, in every tier, in another plan, and at the end."""
    every = [*configurations(tmp_path), {"stage": 3, "wire": {"gather": "int8"}}]
    ranks = run_ranks(2, packed.trainings, LAYERS, every, imported=FRAMEWORKS)
    for number, layer in enumerate(LAYERS):
        plain = packed.trained(layer, None)
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
    layers = (packed.Quantized, packed.in_bfloat16_storage)
    for results in run_ranks(2, packed.files_of, layers, str(tmp_path), imported=FRAMEWORKS):
        assert all(all(result.values()) for result in results), results
    for layer in layers:
        folder = tmp_path / layer.__name__
        assert packed.equal(packed.frozen(packed.model_of(layer)), packed.loaded(layer, f"{folder}/saved", {"stage": 3}))


def test_what_cannot_be_partitioned_is_named():
    weight = torch.nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn))
    with pytest.raises(ballast.Error, match=r"B1005 cannot partition a parameter: it holds torch.float8_e4m3fn"):
        ballast.wrap(torch.optim.SGD([weight]))
    model = packed.model_of(packed.Quantized)
    model[1].base.codes = torch.nn.Parameter(TwoTensor(torch.zeros(3), torch.zeros(3)), requires_grad=False)
    optimizer = packed.wrapped(model, {"stage": 3})
    with pytest.raises(ballast.Error, match=r"B1005 cannot partition a parameter: it is a TwoTensor(.|\n)*1.base.codes"):
        packed.steps(model, optimizer)
    optimizer.close()


def test_attributes_of_bitsandbytes():
    """Stage 3 sets one of them, and looks for the class of the other."""
    import bitsandbytes

    layer = packed.in_four_bits(8, 0)
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
