"""The cases of the losses: a model, and how two hosts train it together over a slow link."""

from typing import NamedTuple

from network import Link
from sites import Site

SITE = Site(2, 1, Link(0.1))
CONTEXT = 64  # bytes of a sequence


class Scheme(NamedTuple):
    """How hosts combine what they have learned: gradients in each step, or parameters every few steps."""

    name: str
    every: int | None = None
    wire: str = "exact"


class Size(NamedTuple):
    """A GPT of examples/gpt.py, and its training. The learning rate rises to the highest, and falls."""

    name: str
    layers: int
    width: int
    sequences: int  # of a step, of both hosts
    learning_rate: float
    steps: int  # unless the command says otherwise
    held_out: int  # sequences that a point of the curve is the mean loss of


DDP = Scheme("DDP")
SCHEMES = (
    DDP,
    Scheme("DiLoCo, every 16", 16),
    Scheme("DiLoCo, every 64", 64),
    Scheme("DiLoCo, every 64, int8", 64, "int8"),
    Scheme("DiLoCo, every 64, int4", 64, "int4"),
)
SIZES = (
    Size("3M", layers=4, width=256, sequences=4, learning_rate=1e-3, steps=640, held_out=128),
    Size("30M", layers=6, width=640, sequences=2, learning_rate=5e-4, steps=128, held_out=32),
)


class LossCase(NamedTuple):
    size: Size
    scheme: Scheme
    seed: int = 0  # of the first values and of the order of the text

    @property
    def name(self) -> str:
        seed = f", seed {self.seed}" if self.seed else ""
        return f"losses, {SITE.name}, {self.size.name}: {self.scheme.name}{seed}"

    def setting(self, steps: int) -> str:
        """Return in words what decides the losses, besides the scheme and the text."""
        size = self.size
        batches = f"{size.sequences} sequences of {CONTEXT} bytes a step"
        return f"{size.layers} layers of width {size.width}, fp32, {steps} steps, {batches}, AdamW at {size.learning_rate:g}"


SEEDS = 3  # at most
CASES = [LossCase(size, scheme, seed) for seed in range(SEEDS) for size in SIZES for scheme in SCHEMES]
