"""1,000 steps beside torch.optim on the same gradients, every element compared.

Both round at each step, ours less often (fused multiply-adds). The bound: 8 ULP of the largest value that the element had
on its way, and 1/5,000 of `lr`; errors of 1,000 steps of half an ULP each would reach 500 if they all went one way.
"""

from functools import cache

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: .ci/bootstrap venv torch")

from kernels import torch_bridge  # noqa: E402

STEPS = 1000
COUNT = 4_099

CASES = {
    "AdamW": ("AdamW", dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)),
    "AdamW, fast betas": ("AdamW", dict(lr=3e-4, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)),
    "AdamW, maximize": ("AdamW", dict(lr=1e-3, eps=1e-8, weight_decay=0.01, maximize=True)),
    "Adam": ("Adam", dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)),
    "Adam, L2": ("Adam", dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05)),
    "SGD": ("SGD", dict(lr=1e-2, weight_decay=0.0)),
    "SGD, L2": ("SGD", dict(lr=1e-2, weight_decay=0.01)),
    "SGD, momentum": ("SGD", dict(lr=1e-2, momentum=0.9, weight_decay=0.01)),
    "SGD, dampening": ("SGD", dict(lr=1e-2, momentum=0.9, dampening=0.3)),
    "SGD, Nesterov": ("SGD", dict(lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "Adagrad": ("Adagrad", dict(lr=1e-2, eps=1e-10)),
    "Adagrad, decays": ("Adagrad", dict(lr=1e-2, eps=1e-10, lr_decay=1e-3, weight_decay=0.01)),
}


@pytest.fixture(autouse=True)
def bridge():
    if not torch_bridge.library_path().exists():
        pytest.skip(f"{torch_bridge.library_path()} is not built")


@cache
def gradients(dtype):
    """Gradients as training has them: of all sizes, correlated from step to step, with exact zeros."""
    random = torch.Generator().manual_seed(1)
    size = 10 ** (torch.rand(COUNT, generator=random) * 6 - 5)
    direction = torch.randn(COUNT, generator=random)
    made = []
    for step in range(STEPS):
        if step % 100 == 0:
            direction = torch.randn(COUNT, generator=random)
        gradient = (direction + torch.randn(COUNT, generator=random)) * size
        gradient[torch.rand(COUNT, generator=random) < 0.05] = 0
        made.append(gradient.to(dtype))
    return made


def parameters():
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_thousand_steps_stay_close_to_torch(case, gradient_dtype):
    rule, options = CASES[case]
    ours, theirs = parameters(), parameters()
    theirs.requires_grad_()
    optimizer = torch_bridge.Optimizer(rule, [ours], **options)
    peer = getattr(torch.optim, rule)([theirs], **options)
    largest = theirs.detach().abs()
    for gradient in gradients(gradient_dtype):
        optimizer.step([gradient])
        theirs.grad = gradient.float()
        peer.step()
        largest = torch.maximum(largest, theirs.detach().abs())
    allowed = largest * 2.0**-23 * 8 + options["lr"] / 5000
    worst = ((ours - theirs.detach()).abs() / allowed).max().item()
    print(f"{case}: at most {worst:.3f} of what is allowed")
    assert worst <= 1


def test_the_first_step_of_each_rule_is_torchs_to_four_ulp():
    for rule, options in CASES.values():
        ours, theirs = parameters(), parameters().requires_grad_()
        gradient = gradients(torch.float32)[0]
        torch_bridge.Optimizer(rule, [ours], **options).step([gradient])
        theirs.grad = gradient
        getattr(torch.optim, rule)([theirs], **options).step()
        scale = torch.maximum(theirs.detach().abs(), torch.tensor(options["lr"]))
        assert ((ours - theirs.detach()).abs() <= scale * 2.0**-21).all(), rule


def test_split_follows_torch_as_fp32_does():
    rule, options = CASES["AdamW"]
    start = parameters().bfloat16()
    fp32, split = start.clone(), start.clone()
    theirs = start.float().requires_grad_()
    optimizers = [torch_bridge.Optimizer(rule, [fp32], "fp32", **options),
                  torch_bridge.Optimizer(rule, [split], "split", **options)]
    peer = torch.optim.AdamW([theirs], **options)
    for gradient in gradients(torch.bfloat16):
        for optimizer in optimizers:
            optimizer.step([gradient])
        theirs.grad = gradient.float()
        peer.step()
    assert torch.equal(fp32.view(torch.int16), split.view(torch.int16))
    assert ((fp32.float() - theirs.detach()).abs() <= theirs.detach().abs() * 2.0**-8 + 1e-9).all()
