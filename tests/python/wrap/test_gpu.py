"""Trainings of a model on a GPU; and on the CPU, so that the cases are tried where there is none."""

import ballast
import pytest
import torch
from ballast.wrapper.gpu import require_stream, stream_on
from python.wrap.loops import Tower


def a_gpu():
    known = ballast.this_machine()
    usable = torch.cuda.is_available() and len(known["gpus"]) > 0
    return pytest.mark.skipif(not usable, reason=known["no_gpu_because"] or "torch has no CUDA")


on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=a_gpu())])
WAYS = [
    {"stage": 2},
    {"stage": 2, "offload": "host"},
    {"stage": 3},
    {"stage": 3, "offload": "host"},
    {"stage": 3, "update_in_backward": True},
]
every_way = pytest.mark.parametrize("way", WAYS, ids=str)


class Training:
    def __init__(self, device: str, **way):
        torch.manual_seed(0)
        self.model = Tower().to(device)
        plain = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer = ballast.wrap(plain, self.model, **way) if way else plain
        self.batch = torch.linspace(-1, 1, 20, device=device)

    def step(self) -> float:
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@on_devices
@every_way
def test_trainings_follow_torch(device, way):
    mine, theirs = Training(device, **way), Training(device)
    for _ in range(5):
        assert mine.step() == pytest.approx(theirs.step(), rel=1e-4)


@on_devices
@every_way
def test_a_training_that_leaves_its_device_goes_on_with_the_same_bits(device, way):
    stays, leaves = Training(device, **way), Training(device, **way)
    for _ in range(3):
        assert stays.step() == leaves.step()
        leaves.optimizer.offload()
        leaves.optimizer.reload()


@on_devices
@pytest.mark.parametrize("way", [each for each in WAYS if each["stage"] < 3], ids=str)
def test_what_is_written_to_parameters_between_steps_is_what_is_trained(device, way):
    mine, theirs = Training(device, **way), Training(device)
    for _ in range(3):
        for training in (mine, theirs):
            with torch.no_grad():
                for parameter in training.model.parameters():
                    parameter.mul_(0.5).add_(0.01)
        assert mine.step() == pytest.approx(theirs.step(), rel=1e-4)


@on_devices
@every_way
def test_gradients_are_clipped_and_checkpoints_go_on(device, way, tmp_path):
    if "update_in_backward" in way:
        pytest.skip("nothing can be clipped")
    first = Training(device, **way)
    first.step()
    ballast.save(tmp_path, first.model, first.optimizer)
    again = Training(device, **way)
    ballast.load_checkpoint(tmp_path, again.model, again.optimizer)
    for training in (first, again):
        training.model(training.batch).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3)
        assert norm.device.type == device
        training.optimizer.step()
        training.optimizer.zero_grad()
    assert first.step() == again.step()


class TorchWithGpus:
    """Stands in for torch.cuda, as far as it is asked which GPU and which stream is the current one."""

    class Stream:
        def __init__(self, handle: int):
            self.cuda_stream = handle

    def __init__(self, device: int, handle: int):
        self.device, self.handle = device, handle

    def current_device(self) -> int:
        return self.device

    def current_stream(self, gpu: int) -> Stream:
        assert gpu == 1
        return self.Stream(self.handle)


def test_a_model_on_a_gpu_that_the_process_does_not_work_on_is_refused(monkeypatch):
    torch_with_gpus = TorchWithGpus(device=0, handle=7)
    monkeypatch.setattr(torch, "cuda", torch_with_gpus)
    with pytest.raises(ballast.UsageError, match=r"torch.cuda.set_device\(1\)"):
        stream_on(1)
    torch_with_gpus.device = 1
    assert stream_on(1) == 7
    require_stream(1, 7)
    torch_with_gpus.handle = 8
    with pytest.raises(ballast.UsageError, match="another CUDA stream"):
        require_stream(1, 7)


def test_without_a_gpu_there_is_no_stream():
    assert stream_on(None) == 0
    require_stream(None, 0)
