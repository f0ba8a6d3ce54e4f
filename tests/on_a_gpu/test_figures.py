"""Tests of the comparison of losses between tiers, of the text of rates, and of figures in a log."""

from on_a_gpu.findings import figures_in, figures_line
from on_a_gpu.rates import figures_of, said
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


RATE = '{"case": "fill fp32", "unit": "GB/s", "rates": [2890.1], "against": "copy", "against_rates": [2798]}'


def test_a_rate_is_said_relative_to_its_limit():
    assert said(RATE) == "== fill fp32: 2,890 GB/s, 1.03 of copy (2,798 GB/s)"


def test_a_limit_alone_is_a_figure():
    """The benchmark of CPU kernels prints its limits first."""
    line = '{"case": "copy (loop)", "unit": "GB/s", "rates": [44, 46], "against": "", "against_rates": []}'
    assert said(line) == "== copy (loop): 45 GB/s"
    assert figures_of(line, "cpu") == {"cpu: copy (loop)": {"value": 45, "unit": "GB/s", "ratio": None, "against": ""}}


def test_a_rate_and_its_limit_are_figures():
    found = figures_of(RATE, "gpu")
    assert set(found) == {"gpu: fill fp32", "gpu: copy"}
    assert found["gpu: fill fp32"]["value"] == 2890.1 and found["gpu: copy"]["value"] == 2798


def test_the_last_figures_of_a_name_count_and_a_cut_line_does_not():
    lines = [figures_line("a", {"x": 1}), figures_line("b", {"y": 2}), figures_line("a", {"x": 3}), 'figures {"b": {"y']
    assert figures_in("\n".join(lines)) == {"a": {"x": 3}, "b": {"y": 2}}
