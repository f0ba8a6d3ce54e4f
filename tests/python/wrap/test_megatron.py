"""Tests of Megatron's distributed optimizer with moments that Ballast keeps."""

import ballast
import pytest
import torch
from python.wrap.support import megatron_runs
from python.wrap.support.ranks import run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed: .ci/bootstrap venv frameworks")


def check_close(one, other, tolerance):
    assert one[0] == pytest.approx(other[0], rel=tolerance)  # the norms of all ranks' gradients
    for mine, theirs in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def test_megatron_trains_clips_saves_and_loads_with_moments_on_drives(tmp_path):
    """In fp32 and in bf16 with fp32 copies, on two ranks that have other shards."""
    for rank in run_ranks(2, megatron_runs.everything, str(tmp_path)):
        for dtype, tolerance in (("torch.float32", 1e-5), ("torch.bfloat16", 2e-2)):
            runs = rank[dtype]
            check_close(runs["plain"], runs["here"], tolerance)
            assert runs["kept"] > 0 and runs["drive"][0][-1] > megatron_runs.CLIP
            for other in ("drive", "resumed"):  # from what Megatron saved
                assert runs["here"][0] == runs[other][0]
                assert all(torch.equal(*each) for each in zip(runs["here"][1], runs[other][1], strict=True))


def test_what_is_not_megatrons_distributed_optimizer_is_refused():
    from ballast.integrations.megatron import stream_state

    class Other:
        is_stub_optimizer = False

    with pytest.raises(ballast.UsageError, match="use_distributed_optimizer=True"):
        stream_state(Other())
    with pytest.raises(ballast.UsageError, match="with stage"):
        stream_state(Other(), stage=3)
