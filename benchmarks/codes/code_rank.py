"""Train the GPT on one of several ranks: code_rank.py CODES SEED STEPS FOLDER RESULT. Rank 0 writes the losses to RESULT."""

import json
import shutil
import sys
from pathlib import Path

import ballast
import gpt
import loss_training
import texts
import torch
import torch.distributed as dist
from variants import TRAINING
from wires import WIRES


def setting(steps: int) -> str:
    return f"{loss_training.setting(TRAINING, steps, 'AdamW in bf16')}, one on each of two ranks, text {text().digest}"


def text() -> texts.Text:
    return texts.TEXTS[TRAINING.text]()


class RankTraining(loss_training.Training):
    """A training whose ranks share the sequences of a step."""

    def __init__(self, codes: str, seed: int, steps: int):
        plan = loss_training.Plan(TRAINING, seed, steps)
        model = plan.model(torch.bfloat16)
        plain = torch.optim.AdamW(model.parameters(), lr=TRAINING.learning_rate)
        super().__init__(plan, text(), model, [ballast.wrap(plain, model, stage=3, wire=WIRES[codes], threads=1)])

    def batches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        number = 1_000_000 * self.plan.seed + step
        return [gpt.batch(self.text.trained, number, loss_training.MICRO_STEPS, loss_training.CONTEXT)]  # this rank's part

    def remove(self, unfinished: Path) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished)


def main() -> None:
    codes, seed, steps, folder, result = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = RankTraining(codes, int(seed), int(steps))
    losses = training.train(Path(folder))
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(losses._asdict()))
    training.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
