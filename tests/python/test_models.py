"""Tests of describe(): it turns known names, configurations, shapes and modules into units."""

import json

import ballast
import pytest
from ballast.models import describe
from ballast.models.known import KNOWN

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_have_their_published_parameters(name):
    assert describe(name).parameters == PUBLISHED[name]


def test_an_assumed_architecture_is_reported():
    assert "counted as LlamaForCausalLM" in ballast.plan(LLAMA).text()
    assert "counted as" not in ballast.plan({**LLAMA, "architectures": ["LlamaForCausalLM"]}).text()


def test_a_configuration_is_a_path_a_folder_or_a_dict(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    names = ["embedding", "layers.0", "layers.1", "layers.2", "norm", "head"]
    for given in (LLAMA, path, str(path), str(tmp_path)):
        assert describe(given).unit_names == names


def test_a_file_has_a_configuration_or_shapes_or_several_of_them_by_name(tmp_path):
    shapes = {"h.0": {"q": [8, 8]}, "h.1": {"q": [8, 8]}}
    alone, several = tmp_path / "shapes.json", tmp_path / "models.json"
    alone.write_text(json.dumps(shapes))
    several.write_text(json.dumps({"small": LLAMA, "tiny": shapes}))
    assert (describe(alone).unit_names, describe(alone).parameters) == (["h.0", "h.1"], 128)
    assert describe(f"{several}:tiny").parameters == 128
    assert describe(f"{several}:small").parameters == describe(LLAMA).parameters
    (tmp_path / "no_model.json").write_text(json.dumps({"hidden_size": 64}))
    with pytest.raises(ballast.UsageError, match="no_model.json has no model: hidden_size is 64"):
        describe(tmp_path / "no_model.json")
    with pytest.raises(ballast.UsageError, match="has 2") as raised:
        describe(several)
    assert raised.value.needed == f"one of {several}:small, {several}:tiny"
    with pytest.raises(ballast.UsageError, match='no model in .* "smal"') as raised:
        describe(f"{several}:smal")
    assert "small" in raised.value.remedy


def test_tied_embeddings_are_counted_once():
    tied = describe({**LLAMA, "tie_word_embeddings": True})
    assert describe(LLAMA).parameters - tied.parameters == 100 * 64
    assert tied.model.units[-1].ties[0].unit == 0
    assert tied.flops == describe(LLAMA).flops  # a tied head is still multiplied


def test_the_dtype_is_the_configurations_or_the_callers():
    assert describe({**LLAMA, "torch_dtype": "float32"}).model.units[0].dtype.name == "fp32"
    assert describe({**LLAMA, "torch_dtype": "float32"}, dtype="fp16").model.units[0].dtype.name == "fp16"
    assert describe(LLAMA).model.units[0].dtype.name == "bf16"


def test_configurations_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ballast.UsageError, match="hidden_size"):
        describe({"model_type": "gpt_neox", "vocab_size": 3})
    with pytest.raises(ballast.UsageError, match="mixture of experts"):
        describe({**LLAMA, "num_local_experts": 8})
    with pytest.raises(ballast.UsageError, match="llama-8b"):
        describe("lama-8b")
    with pytest.raises(ballast.UsageError, match="does not exist"):
        describe(str(tmp_path / "nothing.json"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ballast.UsageError, match="not JSON"):
        describe(str(tmp_path))


def test_shapes_are_grouped_by_the_numbers_in_their_names():
    names = [
        "model.embed.weight",
        "model.layers.0.q.weight",
        "model.layers.0.k.weight",
        "model.layers.1.q.weight",
        "head.weight",
    ]
    described = describe({name: (8, 8) for name in names})
    assert described.unit_names == ["model.embed", "model.layers.0", "model.layers.1", "head"]
    assert described.flops == [0.0, 2 * 2 * 64, 2 * 64, 2 * 64]


def test_a_list_of_shapes_is_a_unit_each():
    assert describe([(4, 4), (8,)]).parameters == 24


@pytest.mark.parametrize("shape", ["4x4", (4, -1), (1.5,), 3])
def test_an_invalid_shape_is_refused(shape):
    with pytest.raises(ballast.UsageError):
        describe({"w": shape})


def test_an_invalid_model_is_refused():
    with pytest.raises(ballast.UsageError):
        describe(3)


class TestModules:
    @pytest.fixture(autouse=True)
    def torch(self):
        self.nn = pytest.importorskip("torch", reason="torch is not installed: .ci/bootstrap venv torch").nn

    def gpt(self, width=16, layers=3, device="meta"):
        nn = self.nn
        blocks = [nn.TransformerEncoderLayer(width, 2, 4 * width, device=device) for _ in range(layers)]
        parts = {
            "words": nn.Embedding(50, width, device=device),
            "places": nn.Embedding(8, width, device=device),
            "blocks": nn.ModuleList(blocks),
            "norm": nn.LayerNorm(width, device=device),
            "head": nn.Linear(width, 50, bias=False, device=device),
        }
        return nn.ModuleDict(parts)

    def test_blocks_and_each_part_outside_of_them_are_units(self):
        model = self.gpt()
        described = describe(model)
        assert described.unit_names == ["words", "places", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
        assert described.parameters == sum(p.numel() for p in model.parameters())
        assert described.model.units[0].dtype.name == "fp32"

    def test_tied_weights_are_counted_once(self):
        model = self.gpt()
        model["head"].weight = model["words"].weight
        described = describe(model)
        assert described.parameters == sum(p.numel() for p in model.parameters())
        assert [(tie.name, tie.unit, tie.tensor) for tie in described.model.units[-1].ties] == [("weight", 0, 0)]

    def test_frozen_parameters_have_no_state(self):
        model = self.gpt()
        trained = ballast.plan(model, dtype="bf16")
        model["blocks"].requires_grad_(False)
        frozen = ballast.plan(model, dtype="bf16")
        assert frozen.memory["device"]["state"] < trained.memory["device"]["state"]

    def test_a_module_in_one_piece_is_one_unit(self):
        assert describe(self.nn.Linear(3, 4)).unit_names == ["model"]

    def test_parameters_outside_of_modules_are_a_unit(self):
        model = self.gpt()
        model.scale = self.nn.Parameter(self.nn.Linear(1, 1).weight.detach())
        assert describe(model).unit_names[0] == "own"

    def test_a_module_without_parameters_is_refused(self):
        with pytest.raises(ballast.UsageError):
            describe(self.nn.ReLU())

    def test_the_same_model_plans_the_same_as_its_shapes(self):
        model = self.gpt().to(dtype=__import__("torch").bfloat16)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert ballast.plan(model, ranks=2).memory == ballast.plan(shapes, ranks=2).memory


def test_all_known_models_can_be_planned():
    for name in KNOWN:
        assert ballast.plan(name, ranks=64, gpu="h200", host_memory="2TiB").fits


def test_a_name_of_the_hub_is_refused_with_what_fetches_its_configuration():
    with pytest.raises(ballast.UsageError, match="owner/model-8B.v1 does not exist") as refused:
        ballast.plan("owner/model-8B.v1")
    assert '"hf download owner/model-8B.v1 config.json"' in refused.value.remedy
    for path in ("folder/model.json", "/owner/model", "./model/config.json"):
        with pytest.raises(ballast.UsageError, match="does not exist") as refused:
            ballast.plan(path)
        assert "hf download" not in refused.value.remedy


def test_an_unknown_name_is_refused_with_what_else_a_model_can_be():
    with pytest.raises(ballast.UsageError, match='B1001 there is no known model "llama-7b"') as refused:
        ballast.plan("llama-7b")
    assert refused.value.needed == f"one of {', '.join(KNOWN)}, or the path of a model's config.json"
