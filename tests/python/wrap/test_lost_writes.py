"""Tests that stage 3 refuses writes to parameters that it cannot keep."""

import ballast
import pytest
import torch
from python.wrap.support import lost_writes
from python.wrap.support.lost_writes import KINDS, Writing, error_of, train, wrapped
from python.wrap.support.ranks import run_ranks

LOST = "cannot keep a write to a parameter outside of"


def check_named(said):
    for kind, name in KINDS.items():
        assert LOST in said[kind.__name__] and f"parameter {name}" in said[kind.__name__], kind


@pytest.fixture(params=["device", "drive"])
def options(request, tmp_path):
    where = f"nvme:{tmp_path}"
    return {} if request.param == "device" else {"offload": {"parameters": where, "state": where}}


def test_writes_in_the_forward_pass_are_refused_by_name(options):
    check_named(lost_writes.said_of_each(0, **options))


def test_writes_in_the_forward_pass_are_refused_on_all_ranks():
    for said in run_ranks(2, lost_writes.said_of_each):
        check_named(said)


def test_a_write_after_an_evaluation_is_refused_where_it_would_be_lost(options):
    model = Writing()
    optimizer = wrapped(model, **options)
    train(model, optimizer)
    with torch.no_grad():
        model(torch.ones(2, 4))
        model.last.weight.zero_()  # its unit is still open
    with pytest.raises(ballast.UsageError, match=f"B1007 {LOST}(.|\n)*parameter last.weight(.|\n)*ballast.gather"):
        train(model, optimizer)
    train(model, optimizer)  # without the write
    with ballast.gather(model):
        assert model.last.weight.any()


def test_assigning_data_between_steps_is_refused_until_it_is_inside_of_gather(options):
    model = Writing()
    optimizer = wrapped(model, **options)
    train(model, optimizer)
    with pytest.raises(ballast.UsageError, match="B1007(.|\n)*parameter first.weight(.|\n)*ballast.gather"):
        model.first.weight.data = torch.zeros(4, 4)
    with ballast.gather(model):
        model.first.weight.data = torch.zeros(4, 4)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer)
    with ballast.gather(model):
        assert not model.first.weight.any()


def test_a_write_before_the_end_is_reported(options, caplog):
    model = Writing()
    optimizer = wrapped(model, **options)
    with torch.no_grad():
        model(torch.ones(2, 4))
        model.last.weight.zero_()
    optimizer.close()
    assert any(LOST in each.message and "parameter last.weight" in each.message for each in caplog.records)


def test_other_memory_with_the_same_values_is_no_write(options):
    """Modules cast biases in place, as those of bitsandbytes do."""

    class Casts(Writing):
        def write(self, x):
            self.second.bias.data = self.second.bias.data.to(torch.bfloat16)
            self.second.weight.data = self.second.weight.data.clone()

    assert error_of(lambda: train(model := Casts(), wrapped(model, **options))) == ""
