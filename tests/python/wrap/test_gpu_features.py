"""Tests that each feature of wrap() trains on a GPU as on the CPU. A card rounds differently, so losses are close there. An
emulated GPU of torch has the kernels of the CPU, so losses and parameters are equal."""

from dataclasses import replace

import ballast
import pytest
import torch
from ballast import DiLoCo
from python.wrap.support.bodies import offloading_everything
from python.wrap.support.devices import on_gpus
from python.wrap.support.loops import Loop, mean_square_in_bfloat16, mlp_in_bfloat16
from python.wrap.support.several import MUON_OPTIONS, Several, muon_of, rule_and_own_step

IN_FP32 = {"steps": 4}
IN_BF16 = {"make_model": mlp_in_bfloat16, "loss": mean_square_in_bfloat16, "steps": 4}
FEATURES = {
    "state in 4 bits": (IN_FP32, {"stage": 3, "state_format": "4bit"}),
    "state in 8 bits on the host": (IN_BF16, {"stage": 2, "state_format": "compact", "offload": "host"}),
    "gradients in bf16": ({**IN_BF16, "micro_steps": 3, "clip": 0.05}, {"stage": 3, "gradient_format": "bf16"}),
    "verified updates": (IN_FP32, {"stage": 3, "verify": 1}),
    "Adafactor": ({**IN_FP32, "make_optimizer": torch.optim.Adafactor}, {"stage": 3}),
    "activations on the host": (IN_FP32, {"stage": 3, "activations": "host"}),
    "an outer optimizer": (IN_FP32, {"stage": 2, "outer": DiLoCo(every=2)}),
}


def trained(loop, options):
    on_host = {name: value for name, value in options.items() if name != "activations"}  # they are there already
    with offloading_everything():
        run = loop.run(**(on_host if loop.device == "cpu" else options))
    with ballast.gather(run.model):
        return run.losses, [each.cpu() for each in run.parameters]


def check_close(found, expected):
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=0.02, atol=1e-3)


def is_same(one, other):
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


@on_gpus
@pytest.mark.parametrize("feature", FEATURES)
def test_a_gpu_trains_as_the_cpu_does(device, feature):
    changes, options = FEATURES[feature]
    loop = Loop(**changes)
    found, expected = trained(replace(loop, device=device), options), trained(loop, options)
    check_close(found, expected)
    assert device == "cuda" or is_same(found, expected)


@on_gpus
@pytest.mark.parametrize("stage", [2, 3])
def test_two_optimizers_train_on_a_gpu_near_the_cpu(device, stage):
    """Torch adds up norms of layers in another order there."""
    check_near_the_cpu(rule_and_own_step, device, stage)


@on_gpus
def test_muon_trains_on_a_gpu_near_the_cpu(device):
    check_near_the_cpu(muon_of(MUON_OPTIONS["like AdamW"]), device, stage=3)


def check_near_the_cpu(make, device, stage):
    training = Several(make, clip=0.5, steps=2)
    on_gpu = replace(training, loop=replace(training.loop, device=device))
    check_close(on_gpu.run(stage=stage), training.run(stage=stage))
