"""The cases: each pair of a state format and a gradient format, trained from each seed, and fine-tuned."""

from typing import NamedTuple

SEEDS = (0, 1, 2)
POINTS = 20  # of a curve of losses


class Variant(NamedTuple):
    """The formats of a training."""

    state: str
    gradients: str

    @property
    def name(self) -> str:
        return f"state {self.state}, gradients {self.gradients}"


class Task(NamedTuple):
    """What a run trains: the text, the schedule, and whether it begins with trained parameters."""

    name: str
    text: str
    part: int  # its steps are those of `training` divided by this
    learning_rate: float  # the highest, after the warm-up
    warm_up: float  # the part of the steps in which the learning rate rises


class Case(NamedTuple):
    task: Task
    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task.name}, {self.variant.name}, seed {self.seed}"


# After 300 steps of training in fp32, the losses of 3e-4 and 1e-3 differ by less than 0.02: the best rate is between them.
TRAINING = Task("training", "torch's Python sources", part=1, learning_rate=5e-4, warm_up=0.05)
FINE_TUNING = Task("fine-tuning", "Python's help topics", part=5, learning_rate=3e-4, warm_up=0.05)
TASKS = (TRAINING, FINE_TUNING)

REFERENCE = Variant("fp32", "fp32")  # state format split has the same bits
FIRST = (REFERENCE, Variant("compact", "fp32"), Variant("4bit", "fp32"))
THEN = (Variant("bf16", "fp32"), Variant("fp32", "bf16"), Variant("compact", "bf16"), Variant("4bit", "bf16"))
VARIANTS = (REFERENCE, THEN[0], *FIRST[1:], *THEN[1:])  # in the order of the table

START = Case(TRAINING, REFERENCE, 0)  # fine-tuning begins with its parameters

# A seed of all variants of a group comes before the next seed, so that an early stop leaves pairs to compare.
CASES = tuple(Case(task, variant, seed) for group in (FIRST, THEN) for task in TASKS for seed in SEEDS for variant in group)
