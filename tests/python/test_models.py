"""Tests of describe(): it turns known names, configurations, shapes and modules into units."""

import json

import ballast
import pytest
from ballast.models import describe
from ballast.models.config import EXACT
from ballast.models.known import KNOWN, known_name

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


# The totals of the published weights, without a second copy of a shared embedding, and of DeepSeek-V3 without its layer for
# the prediction of several tokens.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    **dict.fromkeys(("llama-8b", "llama-3-8b", "llama-3.1-8b"), 8_030_261_248),
    **dict.fromkeys(("llama-70b", "llama-3-70b", "llama-3.1-70b", "llama-3.3-70b"), 70_553_706_496),
    **dict.fromkeys(("llama-405b", "llama-3.1-405b"), 405_853_388_800),
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "tinyllama-1.1b": 1_100_048_384,
    "mistral-7b": 7_241_732_096,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671_026_404_352,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
}
# The parameters that a token passes through, in billions, as the publishers round them.
ACTIVE = {"mixtral-8x7b": 12.9, "qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22, "gpt-oss-120b": 5.1, "deepseek-v3": 37}


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_have_their_published_parameters(name):
    if KNOWN[name]["model_type"] not in EXACT:
        pytest.importorskip("transformers", reason="transformers is not installed: .ci/bootstrap venv frameworks")
    assert describe(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_known_mixtures_of_experts_have_their_published_active_parameters(name):
    pytest.importorskip("transformers", reason="transformers is not installed: .ci/bootstrap venv frameworks")
    assert describe(name).active_parameters / 1e9 == pytest.approx(ACTIVE[name], rel=0.13)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("someone/qwen3-8b", "someone/qwen3-8b"),
        ("mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-v0.3"),
    ],
)
def test_names_of_the_hub_are_known_where_their_publisher_is(written, name):
    assert known_name(written) == name


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
    for name in (name for name, config in KNOWN.items() if config["model_type"] in EXACT):
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
    assert refused.value.needed.endswith("known names (ballast plan --help lists them), or the path of a model's config.json")
    assert refused.value.remedy.startswith('Did you mean "llama-70b"')
    assert '"hf download OWNER/NAME config.json" prints the path' in refused.value.remedy
