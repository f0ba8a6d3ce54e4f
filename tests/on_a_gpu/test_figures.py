"""Tests of the comparison of losses, and of the text of rates."""

from on_a_gpu.rates import said
from on_a_gpu.tiers import compare, losses_of


def write(work, **texts):
    for tier, text in texts.items():
        losses_of(tier, work).write_text(text)


def test_equal_losses_pass(tmp_path, capsys):
    write(tmp_path, device="1 0x1.6p+2\n", host="1 0x1.6p+2\n", drive="1 0x1.6p+2\n")
    assert compare(tmp_path) == 0
    assert "device, host, drive: equal" in capsys.readouterr().out


def test_one_other_bit_fails_and_is_shown(tmp_path, capsys):
    write(tmp_path, device="1 0x1.6p+2\n2 0x1.5p+2\n", host="1 0x1.6p+2\n2 0x1.4p+2\n")
    assert compare(tmp_path) == 1
    assert "host differs from device: 2 0x1.5p+2 vs. 2 0x1.4p+2" in capsys.readouterr().out


def test_losses_of_one_tier_are_not_compared(tmp_path):
    write(tmp_path, device="1 0x1.6p+2\n")
    assert compare(tmp_path) == 1


def test_a_rate_is_said_relative_to_its_limit():
    line = '{"case": "fill fp32", "unit": "GB/s", "rates": [2890.1], "against": "copy", "against_rates": [2798]}'
    assert said(line) == "== fill fp32: 2,890 GB/s, 1.03 of copy (2,798 GB/s)"
