"""Tests of weights that go to an inference engine, and of models that generate themselves."""

from __future__ import annotations

import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
from ballast.torch.parameters.managed_parameter import ParameterState, managed
from python.wrap.support.loops import Loop, Tower, keywords
from python.wrap.support.ranks import FRAMEWORKS, run_ranks

if find_spec("transformers") is None:  # only the ranks import it
    pytest.skip("transformers is not installed: .ci/bootstrap venv frameworks", allow_module_level=True)


Options = dict[str, Any]


def handed_over(rank: int, options: Options) -> dict[str, Any]:
    """Return whether the tensors are those of a state_dict(), and how many units were gathered at the same time."""
    run = Loop(make_model=Tower, rank=rank, ranks=2, steps=2).run(**options)
    model, units, found = run.model, set(), {}

    def take(name: str, tensor: torch.Tensor) -> None:
        states = [state for each in model.parameters() if (state := managed(each)) is not None]
        units.add(len({each.unit for each in states if each.state is ParameterState.GATHERED}))
        found[name] = tensor.clone()

    def refuse(name: str, tensor: torch.Tensor) -> None:
        if rank == 1 and name == "last.weight":
            raise RuntimeError("the engine is gone")

    ballast.sync_weights(model, take)
    first: list[str] = []
    ballast.sync_weights(model, lambda name, _: first.append(name), only_first_rank=True)
    try:
        ballast.sync_weights(model, refuse)
        failure = ""
    except Exception as error:
        failure = str(error)
    with ballast.gather(model):
        expected = model.state_dict()
        known = dict(model.named_parameters()) | dict(model.named_buffers())
        same = found.keys() == known.keys() and all(torch.equal(expected[name], found[name]) for name in found)
    run.optimizer.close()
    return {"same": same, "units": max(units), "first": len(first) == (len(found) if rank == 0 else 0), "failure": failure}


def generated(options: Options | None) -> list[int]:
    """Return tokens that a model generates after a step."""
    import transformers
    from python.wrap.support.frameworks import tiny_model

    transformers.logging.set_verbosity_error()
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if options is not None:
        optimizer = ballast.wrap(optimizer, model, **keywords(**options))
    words = torch.arange(16).view(2, 8)
    model(input_ids=words, labels=words).loss.backward()
    optimizer.step()
    tokens = model.generate(words, max_new_tokens=3, do_sample=False, pad_token_id=0).tolist()
    return [token for row in tokens for token in row]


def generated_with(rank: int, folder: str, free: list[int]) -> tuple[list[int], list[tuple[list[int], Counter[str]]]]:
    """Return what a plain model generates, and what a sharded one does where so many bytes are free, with the gathers of each
    unit. Ranks generate different numbers of tokens."""
    from ballast.integrations.transformers import gathering_to_generate
    from ballast.torch.parameters import gathered_memory
    from python.wrap.support.frameworks import tiny_model

    words = torch.arange(5, 13).view(2, 4)
    options = {"max_new_tokens": 2 + 3 * rank, "do_sample": False, "pad_token_id": 0, "eos_token_id": 63}
    found = []
    for number, size in enumerate(free):
        gathered_memory.available_memory = lambda _, size=size: size
        model = tiny_model(64)
        tuning = ballast.Tuning(timeline=True, keep_gathered=False)
        optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3, tuning=tuning)
        with gathering_to_generate(model):
            tokens = model.generate(words, **options).flatten().tolist()
        file = Path(folder, f"{rank}-{number}.json")
        optimizer.write_timeline(file)
        names = [event["name"] for event in json.loads(file.read_text())]
        found.append((tokens, Counter(name for name in names if name.startswith("gather model."))))
        optimizer.close()
    return tiny_model(64).generate(words, **options).flatten().tolist(), found


def test_a_model_that_fits_is_gathered_once_to_generate_and_others_once_a_token(tmp_path):
    calls = 5  # of the rank with the most tokens
    for tokens, found in run_ranks(2, generated_with, str(tmp_path), [1 << 30, 0], imported=FRAMEWORKS):
        (whole, once), (by_units, often) = found
        assert whole == by_units == tokens
        assert len(once) == len(often) >= 4  # an embedding, two layers, a norm
        assert max(once.values()) <= 2  # the program of a step has begun with the first ones
        assert all(calls <= count <= calls + 1 for count in often.values())


def all_of_them(rank: int, every: list[Options]) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the tokens of the plain model, and the results with each of these options."""
    return generated(None), [{**handed_over(rank, options), "tokens": generated(options)} for options in every]


def test_weights_are_handed_over_unit_by_unit():
    every = [{"stage": 2}, {"stage": 3}]
    for rank, (tokens, results) in enumerate(run_ranks(2, all_of_them, every, imported=FRAMEWORKS)):
        for options, result in zip(every, results):
            assert result["same"], options
            assert result["first"]
            assert result["units"] <= 1
            assert ("the engine is gone" if rank == 1 else "rank 1") in result["failure"]
            assert result["tokens"] == tokens
        assert results[1]["units"] == 1
