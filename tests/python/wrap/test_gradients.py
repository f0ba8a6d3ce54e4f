"""Tests of what users do with gradients that Ballast has taken: it does as torch does, or refuses and trains on."""

import ballast
import pytest
import torch
from python.wrap.support.loops import mean_square, mlp

BATCH = torch.linspace(-1, 1, 20)


class Training:
    """A training of a small model, with a plain optimizer or with a wrapped one."""

    def __init__(self, kind=torch.optim.AdamW, rate=0.1, **options):
        self.model = mlp()
        self.optimizer = kind(self.model.parameters(), lr=rate, weight_decay=0.1)
        self.options = options
        if options:
            self.optimizer = ballast.wrap(self.optimizer, self.model, **options)

    @property
    def gradients(self):
        return [each.grad for each in self.model.parameters()]

    def backward(self, scale=1.0):
        (mean_square(self.model, BATCH) * scale).backward()

    def step(self):
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self):
        if not self.options:
            return [each.detach().clone() for each in self.model.parameters()]
        with ballast.gather(self.model):
            return [each.detach().clone() for each in self.model.parameters()]


def check_as_plain(body, kind=torch.optim.AdamW, configurations=({"stage": 2}, {"stage": 3})):
    """Compare trainings in which `body` does the same: what it returns, and the parameters in the end."""
    plain = Training(kind)
    expected = body(plain)
    for options in configurations:
        ours = Training(kind, **options)
        assert body(ours) == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(ours.values(), plain.values(), rtol=1e-5, atol=1e-6)


def check_trains_on(after, kind=torch.optim.AdamW):
    """Compare a training with a plain one, in which `after` runs between the backward pass and the step and changes nothing."""
    plain = Training(kind)
    plain.step(), plain.step()
    for stage in (2, 3):
        ours = Training(kind, stage=stage)
        ours.backward()
        after(ours)
        ours.optimizer.step()
        ours.optimizer.zero_grad()
        ours.step()
        torch.testing.assert_close(ours.values(), plain.values(), rtol=1e-5, atol=1e-6)


# --- Norms after a step ---


def norms(training):
    return [float(each.norm()) for each in training.gradients]


def test_norms_that_were_known_before_a_step_are_known_after_it():
    def clipped(training):
        seen = []
        for _ in range(2):
            training.backward()
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
            training.optimizer.step()
            seen += norms(training)
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.02)
            seen += norms(training)
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.005)  # too late for this step, and not for the next
            training.optimizer.zero_grad()
        return seen

    check_as_plain(clipped)


@pytest.mark.parametrize("read", [norms, lambda training: training.optimizer.clip_grad_norm_(1.0)])
def test_norms_that_a_step_has_not_kept_are_refused(read):
    plain = Training()
    plain.step(), plain.step()
    for stage in (2, 3):
        ours = Training(stage=stage)
        ours.backward()
        ours.optimizer.step()
        with pytest.raises(ballast.UsageError, match="B1007 cannot compute (.|\n)*used(.|\n)*before step(.|\n)*grad_norm"):
            read(ours)
        ours.optimizer.zero_grad()
        ours.step()
        torch.testing.assert_close(ours.values(), plain.values(), rtol=1e-5, atol=1e-6)


def test_a_norm_that_was_kept_from_a_cleared_step_is_refused():
    ours = Training(stage=2)
    ours.backward()
    kept = ours.gradients
    ours.model.zero_grad()
    ours.optimizer.step()
    with pytest.raises(ballast.UsageError, match="B1007 cannot compute"):
        kept[0].norm()
    ours.step()


def test_the_norm_of_no_gradients_is_zero():
    def stepped(training):
        clip = getattr(training.optimizer, "clip_grad_norm_", lambda norm: torch.zeros((), device="cpu"))
        first = float(clip(1.0))
        training.step()
        last = float(clip(1.0))
        training.step()
        return [first, last]

    check_as_plain(stepped)
