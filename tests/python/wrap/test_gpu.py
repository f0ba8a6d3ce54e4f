"""Tests of trainings on a GPU. Most run on the CPU too, so that they are tried on machines without a GPU."""

from collections.abc import Callable
from contextlib import contextmanager

import ballast
import pytest
import torch
from ballast.torch import gpu
from ballast.torch.calls import sharded_parameters
from ballast.torch.gpu import require_stream, stream_on
from python.wrap.support.devices import on_devices, on_gpus
from python.wrap.support.loops import Tower, keywords

CONFIGURATIONS = [
    {"stage": 2},
    {"stage": 2, "overlap_gathers": True},
    {"stage": 2, "offload": "host"},
    {"stage": 3},
    {"stage": 3, "offload": "host"},
    {"stage": 3, "update_in_backward": True},
]
every_configuration = pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)


class Training:
    def __init__(self, device: str, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **configuration):
        torch.manual_seed(0)
        self.model = Tower().to(device)
        plain = kind(self.model.parameters(), lr=1e-2)
        self.optimizer = ballast.wrap(plain, self.model, **keywords(**configuration)) if configuration else plain
        self.batch = torch.linspace(-1, 1, 20, device=device)

    def step(self) -> float:
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@on_devices
@every_configuration
def test_trainings_follow_torch(device, configuration):
    mine, theirs = Training(device, **configuration), Training(device)
    for _ in range(5):
        assert mine.step() == pytest.approx(theirs.step(), rel=1e-4)


@on_devices
@pytest.mark.parametrize("offload", [None, "host", "nvme", {"device": 0.4, "host": 0.3, "nvme": 0.3}], ids=str)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_of_the_optimizers_own_follows_torch(device, stage, offload, tmp_path):
    fractions = offload if isinstance(offload, dict) else {offload: 1.0}
    tiers = {f"nvme:{tmp_path}" if tier == "nvme" else tier: part for tier, part in fractions.items()}
    mine = Training(device, kind=torch.optim.NAdam, stage=stage, offload=None if offload is None else {"state": tiers})
    theirs = Training(device, kind=torch.optim.NAdam)
    for _ in range(4):
        assert mine.step() == pytest.approx(theirs.step(), rel=1e-4)


@on_devices
@every_configuration
def test_an_offloaded_training_continues_with_the_same_bits(device, configuration):
    plain, offloaded = Training(device, **configuration), Training(device, **configuration)
    for _ in range(3):
        assert plain.step() == offloaded.step()
        offloaded.optimizer.offload()
        offloaded.optimizer.reload()


@on_devices
@pytest.mark.parametrize("configuration", [each for each in CONFIGURATIONS if each["stage"] < 3], ids=str)
def test_values_written_to_parameters_between_steps_are_trained(device, configuration):
    mine, theirs = Training(device, **configuration), Training(device)
    for _ in range(3):
        for training in (mine, theirs):
            with torch.no_grad():
                for parameter in training.model.parameters():
                    parameter.mul_(0.5).add_(0.01)
        assert mine.step() == pytest.approx(theirs.step(), rel=1e-4)


@on_devices
@pytest.mark.parametrize("configuration", [each for each in CONFIGURATIONS if each["stage"] < 3], ids=str)
def test_values_written_right_before_a_step_are_trained(device, configuration):
    mine, theirs = Training(device, **configuration), Training(device)
    for _ in range(3):
        for training in (mine, theirs):
            training.model(training.batch).square().mean().backward()
            with torch.no_grad():
                for parameter in training.model.parameters():
                    parameter.mul_(0.5).add_(0.01)
            training.optimizer.step()
            training.optimizer.zero_grad()
    assert mine.step() == pytest.approx(theirs.step(), rel=1e-4)


@on_devices
@every_configuration
def test_gradients_are_clipped_and_checkpoints_resume(device, configuration, tmp_path):
    if "update_in_backward" in configuration:
        pytest.skip("nothing can be clipped")
    first = Training(device, **configuration)
    first.step()
    ballast.save(tmp_path, first.model, first.optimizer)
    again = Training(device, **configuration)
    ballast.load_checkpoint(tmp_path, again.model, again.optimizer)
    for training in (first, again):
        training.model(training.batch).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3)
        assert norm.device.type == device
        training.optimizer.step()
        training.optimizer.zero_grad()
    assert first.step() == again.step()


@on_devices
@every_configuration
def test_the_default_device_of_torch_is_only_for_the_caller(device, configuration, tmp_path):
    """Ballast reads and writes memory of the host for state and checkpoints, also where torch.set_default_device() names a
    GPU."""
    with torch.device(device):
        first, again = Training(device, **configuration), Training(device, **configuration)
        first.step()
        ballast.save(tmp_path / "saved", first.model, first.optimizer, wait=False).wait()
        ballast.load_checkpoint(tmp_path / "saved", again.model, again.optimizer)
        assert first.step() == again.step()
        torch.save(first.optimizer.state_dict(), tmp_path / "state")
        again.optimizer.load_state_dict(torch.load(tmp_path / "state", map_location="cpu"))
        ballast.export(first.model, tmp_path / "exported.safetensors")
        again.model.last.weight.requires_grad_(False)
        first.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        for training in (first, again):
            training.step()
            training.optimizer.close()


class Streams:
    """Stands in for CUDA streams in a training on the CPU. Records the current stream and the waits."""

    def __init__(self, patch):
        self.current, self.waits = 0, 0
        patch.setattr(gpu, "current_stream", lambda _: self.current)
        patch.setattr(gpu, "gpu_module", lambda: self)

    def synchronize(self, _: object) -> None:
        self.waits += 1

    def default_stream(self, _: object) -> int:
        return 0

    def ExternalStream(self, handle: int, device: object) -> int:
        return handle

    @contextmanager
    def stream(self, handle: int):
        before, self.current = self.current, handle
        yield
        self.current = before


@pytest.fixture
def in_another_stream(device):
    gpu_module = torch.get_device_module(device)
    return lambda: gpu_module.stream(gpu_module.Stream())


def uses_of(training: Training, folder) -> dict[str, Callable[[], object]]:
    """Return by name calls that read or write parameters, gradients or state in the middle of a step."""
    training.model(training.batch)
    last = torch.ones(20, device=training.batch.device)
    return {
        "a call of the model": lambda: training.model(training.batch),
        "an evaluation": torch.no_grad()(lambda: training.model(training.batch)),
        "the module whose parameters are there": torch.no_grad()(lambda: training.model.head(last)),
        "gather": lambda: ballast.gather(training.model).__enter__(),
        "step": training.optimizer.step,
        "clip_grad_norm_": lambda: training.optimizer.clip_grad_norm_(1.0),
        "export": lambda: ballast.export(training.model, folder / "exported.safetensors"),
        "offload": training.optimizer.offload,
        "save": lambda: ballast.save(folder / "saved", training.model, training.optimizer),
    }


# These read full parameters, ordinary tensors, below stage 3: a caller in another stream has to wait itself.
ON_FULL_PARAMETERS = ("a call of the model", "an evaluation", "the module whose parameters are there", "gather", "export")


@on_gpus
@every_configuration
def test_operations_in_another_stream_are_refused_and_change_nothing(device, configuration, in_another_stream, tmp_path):
    training, undisturbed = Training(device, **configuration), Training(device, **configuration)
    assert training.step() == undisturbed.step()
    for name, use in uses_of(training, tmp_path).items():
        if configuration["stage"] < 3 and name in ON_FULL_PARAMETERS:
            continue
        with in_another_stream(), pytest.raises(ballast.UsageError, match="B1007(.|\n)*another CUDA stream"):
            use()
            pytest.fail(f"{name} was not refused")
    training.optimizer.zero_grad()
    assert training.step() == undisturbed.step()
    training.optimizer.offload()
    with in_another_stream():
        training.optimizer.reload()
    ballast.save(tmp_path, training.model, training.optimizer)
    with in_another_stream(), pytest.raises(ballast.UsageError, match="another CUDA stream"):
        ballast.load_checkpoint(tmp_path, training.model, training.optimizer)
    ballast.load_checkpoint(tmp_path, training.model, training.optimizer)
    assert training.step() == undisturbed.step()


@on_gpus
@every_configuration
@pytest.mark.parametrize("when", ["between steps", "in a step", "offloaded"])
def test_a_training_ends_in_any_stream(device, configuration, when, in_another_stream):
    training, undisturbed = Training(device, **configuration), Training(device, **configuration)
    assert training.step() == undisturbed.step()
    if when == "in a step" and not configuration.get("update_in_backward"):
        training.model(training.batch).sum().backward()
    if when == "offloaded":
        training.optimizer.offload()
    with in_another_stream():
        training.optimizer.close()
    undisturbed.optimizer.close()
    assert all(map(torch.equal, training.model.parameters(), undisturbed.model.parameters()))


@on_gpus
@pytest.mark.parametrize("configuration", [each for each in CONFIGURATIONS if each["stage"] < 3], ids=str)
def test_values_that_another_stream_still_writes_are_there_at_the_end(device, configuration, in_another_stream):
    training, undisturbed = Training(device, **configuration), Training(device, **configuration)
    assert training.step() == undisturbed.step()
    with in_another_stream(), torch.no_grad():
        torch.get_device_module(device)._sleep(50_000_000)
        for parameter in training.model.parameters():
            parameter.fill_(2)
        training.optimizer.close()
    assert all((parameter == 2).all() for parameter in training.model.parameters())


@on_gpus
@pytest.mark.parametrize("use", [lambda each: torch.nn.utils.clip_grad_norm_(each, 1.0), lambda each: each[0].grad.norm()])
def test_norms_of_gradients_in_another_stream_are_refused(device, in_another_stream, use):
    training = Training(device, stage=3)
    training.model(training.batch).sum().backward()
    with in_another_stream(), pytest.raises(ballast.UsageError, match="another CUDA stream"):
        use(list(training.model.parameters()))
    use(list(training.model.parameters()))
    training.optimizer.step()


@on_gpus
def test_a_parameter_that_a_running_module_uses_in_another_stream_is_refused(device, in_another_stream):
    training = Training(device, stage=3)
    training.step()

    def use(*_: object) -> None:
        with in_another_stream(), pytest.raises(ballast.UsageError, match="another CUDA stream"):
            training.model.last.weight.sum()
        training.model.last.weight.sum()

    hook = training.model.first.register_forward_hook(use)
    training.model(training.batch)
    hook.remove()


@on_gpus
def test_writes_are_kept_in_the_stream_of_the_training(device, in_another_stream, monkeypatch):
    training, seen, gpu_module = Training(device, stage=3), [], torch.get_device_module(device)
    of_training = gpu.current_stream(0)
    training.step()
    keep, synchronize = sharded_parameters.agree_on_writes, gpu_module.synchronize
    monkeypatch.setattr(sharded_parameters, "agree_on_writes", lambda *args: seen.append(gpu.current_stream(0)) or keep(*args))
    monkeypatch.setattr(gpu_module, "synchronize", lambda *args: seen.append("waits") or synchronize(*args))
    block = ballast.gather(training.model)
    block.__enter__()
    torch.nn.init.ones_(training.model.last.weight)
    with in_another_stream():
        block.__exit__(None, None, None)
    assert seen == ["waits", of_training, "waits"]  # one wait before the values are read, and one before memory is reused
    with ballast.gather(training.model):
        assert (training.model.last.weight == 1).all()


def test_the_end_is_worked_out_in_the_stream_of_the_training(monkeypatch):
    streams = Streams(monkeypatch)
    with streams.stream(8):
        for of_training in (0, 7, 8):
            with gpu.in_stream(1, of_training):
                assert streams.current == of_training
        assert (streams.current, streams.waits) == (8, 4)


class TorchWithGpus:
    """Stands in for torch.cuda with a current GPU and a current stream."""

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
    monkeypatch.setattr(gpu, "gpu_module", lambda: torch_with_gpus)
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
