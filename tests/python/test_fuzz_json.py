"""Damages the JSON files that need no torch to read: configurations, measured figures, and recorded steps. A reader returns or
raises ballast.Error."""

import json
import random

import ballast
import pytest
from ballast.checks import refuse
from ballast.deepspeed_config import import_deepspeed
from ballast.models import config
from ballast.planning.hardware import read_measured
from ballast.tools.report import read_run, run_page, summary
from python.damage import CASES, SEED, damaged, with_another_value

LLAMA = {"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False}
DEEPSPEED = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"}}}
DEEPSPEED |= {"bf16": {"enabled": True}, "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 4}
DEEPSPEED |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}}}
MEASURED = {"device": "cpu", "memory": 1 << 30, "flops": 1e12, "cores": 2, "rates": {"read": 1e9, "write": 1e9}}
ABOUT = {"format": 1, "ballast": "0", "host": "node", "began": 1.0, "ranks": 2}
STEP = {"step": 1, "seconds": 0.5, "at": 2.0, "loss": 3.0, "memory": 1 << 30, "norm": None}


@pytest.fixture(autouse=True)
def only_arithmetic(monkeypatch):
    """Do not import transformers, which takes seconds, for a forged model_type."""
    monkeypatch.setattr(config, "from_transformers", lambda *_, **__: refuse("cannot count the parameters of this model_type"))


def plan_of(path):
    ballast.plan(str(path), ranks=2)


def report_of(path):
    logs = read_run(path.parent)
    run_page("run", logs)
    summary(logs)


READERS = {
    "config.json": ([LLAMA], plan_of),
    "shapes.json": ([{"h.0.weight": [64, 64], "h.1.weight": [64, 64], "head": [320, 64]}], plan_of),
    "deepspeed.json": ([DEEPSPEED], import_deepspeed),
    "bench.json": ([{"ballast_bench": 1, "measured": MEASURED, "busy": False}], read_measured),
    "rank-0.jsonl": ([ABOUT, STEP, STEP | {"step": 2, "at": 3.0}], report_of),
}


def damage(rng, objects):
    """Return the text of a file of these objects, of which one is forged, or whose bytes are damaged."""
    objects = list(objects)
    number = rng.randrange(len(objects))
    forged = rng.random() < 0.7
    if forged:
        objects[number] = with_another_value(rng, objects[number])
    text = "\n".join(json.dumps(each) for each in objects).encode()
    return text if forged else damaged(rng, text)


@pytest.mark.parametrize("name", READERS)
def test_damaged_json_is_refused_or_read(name, tmp_path):
    objects, read = READERS[name]
    path = tmp_path / name
    path.write_text("\n".join(json.dumps(each) for each in objects))
    read(path)
    for seed in range(SEED, SEED + CASES):
        path.write_bytes(damage(random.Random(f"{name} {seed}"), objects))
        try:
            read(path)
        except ballast.Error:
            pass
        except BaseException as error:
            raise AssertionError(f"{name}, seed {seed}: {error!r}") from error


@pytest.mark.parametrize("name", READERS)
def test_deeply_nested_json_is_refused(name, tmp_path):
    _, read = READERS[name]
    path = tmp_path / name
    path.write_text('{"a":' * 100_000)
    with pytest.raises(ballast.Error):
        read(path)
