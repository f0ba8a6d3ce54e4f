"""Tests that each change that `ballast plan` suggests, when nothing fits, does fit."""

import contextlib
import io
import json
import re
import shlex
from functools import cache

import ballast
import pytest
from ballast.options import Options
from ballast.planning.request import request_plan
from ballast.planning.suggestions import Change, Search, machines_for, settings_of
from ballast.schema import options_of
from ballast.tools.command_line import main


@cache
def answer_to(words):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(["plan", *words])
    lines = said.getvalue().splitlines(keepends=True)
    return code, "".join(line for line in lines if not line.endswith("the last one counts\n"))


def plan(words):
    """Return the exit code and the error, without notes on options whose suggested values are added behind the first ones.
    Suggestions take seconds, so each is made once for all tests."""
    return answer_to(tuple(words))


def lines_in(remedy):
    """Return the suggestions in a remedy, each on one line."""
    text = remedy.partition("Any of these fits:\n")[2].partition("\n  raised at")[0]
    return [line.strip() for line in text.replace("\n" + " " * 6, " ").splitlines()]


def suggestions_in(error):
    """Return the options of each suggestion in an error of `ballast plan`."""
    return [shlex.split(line.partition(": ")[0]) for line in lines_in(error)]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("llama-70b --ranks 8 --gpu a100 --headroom 0", "--state-format compact --update-in-backward"),
        ("llama-70b --ranks 8 --gpu h100 --state-format compact --headroom 0", "--update-in-backward"),
        ("llama-8b --ranks 1 --gpu rtx4090 --host-memory 70GiB --tokens 5120", "--state-format compact"),
        ("llama-70b --ranks 8 --gpu h100 --tokens 5120 --headroom 0", "--state-format 4bit --gradient-format bf16"),
        ("llama-70b --ranks 1 --gpu h200 --host-memory 128GiB --drive-space 64GiB", "--update-in-backward --drive-space 1TiB"),
        ("llama-70b --ranks 8 --gpu h100 --stage 0 --host-memory 2TiB", "--stage auto"),
        ("llama-70b --ranks 8 --gpu h100 --offload host --host-memory 100GiB", "--host-memory 1TiB"),
        ("llama-8b --ranks 4 --gpu rtx4090 --offload none --host-memory 2TiB", "--offload auto"),
        ("llama-8b --ranks 8 --gpu a100 --activations kept --tokens 16384", "--activations checkpointed"),
        ("llama-70b --ranks 8 --gpu h100 --tokens 1048576 --reserve 2GiB", "--tokens 2048 --state-format compact"),
        ("llama-8b --ranks 16 --gpu rtx4090 --keep-gathered all", "--keep-gathered 0"),
        ("llama-8b --ranks 16 --gpu rtx4090 --prefetch 60", "--prefetch 1"),
        ("llama-8b --ranks 16 --gpu rtx4090 --replicas 8 --tokens 5120", "--replicas 1"),
        ("llama-8b --ranks 16 --gpu h100 --outer every=64", "--host-memory 128GiB"),
        ("llama-70b --ranks 8 --gpu h100 --state-format compact --micro-steps 4 --headroom 0", "--micro-steps 1 --update"),
    ],
)
def test_suggestions_fit(asked, expected):
    code, error = plan(asked.split())
    assert code == 1
    found = suggestions_in(error)
    assert any(" ".join(words).startswith(expected) for words in found), error
    for words in found:
        assert plan([*asked.split(), *words]) == (0, "")


def test_changes_name_options_that_exist():
    request = request_plan("llama-8b", ranks=16, stage=2, offload="host", host_memory="1TiB", micro_steps=2)
    axes = [*settings_of(request), *machines_for(request.options)]
    names = {name for axis in axes for change in axis for name, _ in change.written}
    assert len(names) > 5 and names <= set(options_of(Options))


@pytest.mark.parametrize("asked", ["llama-405b --ranks 1 --gpu rtx3090", "llama-8b --ranks 8 --gpu a100 --activations 100GiB"])
def test_where_no_change_fits_the_remedy_lists_the_changes(asked):
    code, error = plan(asked.split())
    assert code == 1
    assert not suggestions_in(error)
    listed = error.partition("all together:\n")[2].partition("  raised at")[0]
    assert max(map(len, listed.splitlines())) <= 100
    tried = shlex.split(listed)
    for option in ("--state-format", "--gradient-format", "--update-in-backward", "--ranks", "--host-memory", "--drive-space"):
        assert option in tried
    assert plan([*asked.split(), *tried])[0] == 1


def test_a_suggestion_is_the_smallest_of_its_kind():
    asked = "llama-70b --ranks 8 --gpu a100".split()
    _, error = plan(asked)
    ranks = next(words for words in suggestions_in(error) if words[0] == "--ranks")
    assert plan([*asked, "--ranks", str(int(ranks[1]) // 2)])[0] == 1


def test_nothing_is_suggested_that_is_requested_already():
    from ballast.planning.suggestions import machines_for, settings_of

    given = {"state_format": "4bit", "gradient_format": "bf16", "update_in_backward": True, "activations": "1GiB"}
    given |= {"host_memory": "4TiB", "drive_space": "64TiB"}
    request = request_plan("gpt2", **given)
    assert settings_of(request) == []
    assert [axis[0].written for axis in machines_for(request.options)] == [(("ranks", 2),)]


@pytest.mark.parametrize(
    ("asked", "keywords"),
    [
        ("llama-8b --ranks 1 --gpu rtx4090 --host-memory 64GiB", {"ranks": 1, "gpu": "rtx4090", "host_memory": "64GiB"}),
        ("llama-8b --ranks 4 --gpu t4 --state-format compact --gradient-format bf16 --tokens 512", {"ranks": 4, "gpu": "t4"}),
    ],
)
def test_advice_is_written_as_the_caller_writes_options(asked, keywords):
    _, error = plan(asked.split())
    assert suggestions_in(error)
    if "format" not in asked:
        with pytest.raises(ballast.OutOfMemoryError) as raised:
            ballast.plan("llama-8b", **keywords)
        lines = lines_in(raised.value.remedy)
        assert "--" not in raised.value.remedy and len(lines) == len(suggestions_in(error))
        for line in lines:
            assert ballast.plan("llama-8b", **{**keywords, **eval(f"dict({line.partition(': ')[0].strip()})")}).fits


def test_more_ranks_keep_the_copies_that_were_tried():
    from ballast.planning.suggestions import machines_for

    options = request_plan("gpt2", ranks=16, replicas="host").options
    assert machines_for(options)[0][0].written == (("ranks", 32), ("replicas", 2))


def test_a_pair_of_a_setting_and_a_machine_is_found():
    asked = "llama-70b --ranks 1 --gpu rtx4090"
    _, error = plan(asked.split())
    (found,) = suggestions_in(error)
    assert found[:1] == ["--tokens"] and "--host-memory" in found
    assert plan([*asked.split(), *found]) == (0, "")


def test_three_changes_are_suggested_where_two_do_not_fit():
    asked = "llama-70b --ranks 8 --gpu h100 --tokens 1048576"
    _, error = plan(asked.split())
    found = suggestions_in(error)
    assert sorted(words[::2] for words in found[:2]) == [
        ["--tokens", "--state-format", "--gradient-format"],
        ["--tokens", "--state-format", "--update-in-backward"],
    ]
    assert [words[::2] for words in found[2:]] == [["--tokens", "--host-memory"], ["--tokens", "--ranks"]]
    for words in found:
        assert plan([*asked.split(), *words]) == (0, "")


def test_more_settings_are_changed_where_fewer_would_cut_sequences():
    asked = "qwen2.5-14b --gpu rtx4090 --host-memory 64GiB"
    _, error = plan(asked.split())
    cut, *whole = [line for line in lines_in(error) if "--host-memory" not in line]
    assert cut.startswith("--tokens 2048 --state-format 4bit --update-in-backward: ") and "sequences are cut" in cut
    assert any(line.startswith("--loss-chunk 512 --state-format 4bit ") for line in whole)
    assert not any("sequences are cut" in line for line in whole)
    for words in suggestions_in(error):
        assert plan([*asked.split(), *words]) == (0, "")


def test_advice_keeps_the_sequences_that_the_caller_names():
    asked = "llama-70b --ranks 1 --gpu rtx4090 --sequence 4096"
    _, error = plan(asked.split())
    found = suggestions_in(error)
    assert found
    for each in found:
        assert each[each.index("--tokens") + 1] == "4096"
        assert plan([*asked.split(), *each]) == (0, "")


ASKED = {"--drive-space": 1, "--state-format": 2, "--gradient-format": 2, "--host-memory": 3, "--ranks": 4}


@pytest.mark.parametrize(
    "asked",
    [
        "llama-70b --ranks 1 --gpu h200 --host-memory 128GiB --drive-space 64GiB",
        "llama-8b --ranks 1 --gpu rtx4090 --host-memory 64GiB",
        "llama-70b --ranks 8 --gpu a100",
    ],
)
def test_the_suggestion_that_asks_the_least_comes_first(asked):
    """Settings that change no value come first, then drives, smaller formats and sequences, host memory, and ranks."""
    _, error = plan(asked.split())
    assert max(map(len, error.splitlines())) <= 100
    order = []
    for line, words in zip(lines_in(error), suggestions_in(error), strict=True):
        asks = max([ASKED.get(word, 0) for word in words] + [2 * ("sequences are cut" in line)])
        changes = sum(word.startswith("--") for word in words) - ("--micro-steps" in words)
        order.append((asks, changes, -float(re.search(r"([\d,]+) tokens/s", line)[1].replace(",", ""))))
    assert len(order) > 2 and order == sorted(order)


def test_shorter_sequences_are_mentioned():
    asked = "llama-8b --ranks 1 --gpu rtx4090 --gpu-memory 24GiB --host-memory 70GiB --stage 2"
    _, error = plan(asked.split())
    for line, words in zip(lines_in(error), suggestions_in(error), strict=True):
        tokens = words[words.index("--tokens") + 1] if "--tokens" in words else "4096"
        cut = f"; sequences are cut from 4,096 to {int(tokens):,} tokens" if int(tokens) < 4096 else ""
        assert line.endswith(f" tokens/s{cut}")
    assert "sequences are cut" in error.replace("\n      ", " ")


@pytest.mark.parametrize("tokens", [57344, 24576])
def test_smaller_micro_steps_divide_the_tokens_of_a_step(tokens):
    from ballast.planning.suggestions import settings_of

    request = request_plan("llama-8b", tokens=tokens, micro_steps=3, sequence=4096)
    changes = [dict(change.written) for axis in settings_of(request) for change in axis if change.written[0][0] == "tokens"]
    parts = [count for count in range(2, 9) if tokens % count == 0 and tokens // count >= 4096]
    assert changes[: len(parts)] == [{"tokens": tokens // count, "micro_steps": 3 * count} for count in parts]
    assert all(change["tokens"] in (4096, 8192, 16384, 32768) and len(change) == 1 for change in changes[len(parts) :])
    most = request_plan("llama-8b", tokens=tokens, micro_steps=4096)
    assert not any("micro_steps" in dict(change.written) for change in settings_of(most)[0])


def test_tiers_that_the_caller_has_not_named_are_mentioned():
    _, error = plan("llama-70b --ranks 8 --gpu a100".split())
    assert "--host-memory and --drive-space were not given: 0 assumed." in error
    _, error = plan("llama-70b --ranks 1 --gpu a100 --host-memory 0".split())
    assert "--drive-space was not given: 0 assumed." in error
    assert "host_memory and drive_space were not given: 0 assumed" in ballast.plan("gpt2").notes
    assert not any("not given" in note for note in ballast.plan("gpt2", host_memory="1GiB").notes)


# Layers and width of a hidden layer, of models with 5,120 channels and a vocabulary of 152,064.
LAYERS = {"14B": (48, 13_824), "32B": (64, 27_648)}


@pytest.mark.parametrize(
    ("size", "asked"),
    [
        ("14B", "--gpu rtx4090 --host-memory 64GiB --update-in-backward --tokens 5120 --headroom 0"),
        ("32B", "--gpu h100 --host-memory 128GiB --update-in-backward"),
        ("32B", "--gpu h100 --host-memory 128GiB --tokens 1024 --headroom 0"),
    ],
)
def test_the_smallest_formats_fit_large_models_on_one_gpu(tmp_path, size, asked):
    layers, width = LAYERS[size]
    config = {"model_type": "qwen2", "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8}
    config |= {"vocab_size": 152_064, "num_hidden_layers": layers, "intermediate_size": width, "tie_word_embeddings": False}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    words = [str(path), "--ranks", "1", *asked.split()]
    assert plan(words)[0] == 1
    assert plan([*words, "--state-format", "auto", "--gradient-format", "auto"]) == (0, "")


class SearchOfSizes(Search):
    """A search in which a request fits with these sizes, or larger ones, of some options."""

    def __init__(self, **sizes):
        self._sizes = sizes

    def _fits(self, changes):
        given = dict(option for change in changes for option in change.written)
        return all(given.get(name, 0) >= size for name, size in self._sizes.items())


def test_many_changes_are_as_small_and_as_few_as_possible():
    axes = [[Change.of({name: size}) for size in (1, 2, 3)] for name in "abcdef"]
    search = SearchOfSizes(a=2, c=1, d=3, f=1)

    def sizes(changes):
        return dict(option for change in changes for option in change.written)

    assert search.fewest(axes) == []
    assert sizes(search.least(axes, may_drop=True)) == {"a": 2, "c": 1, "d": 3, "f": 1}
    assert sizes(search.least(axes)) == {"a": 2, "b": 1, "c": 1, "d": 3, "e": 1, "f": 1}
    assert search.least(axes[:3], may_drop=True) == []
