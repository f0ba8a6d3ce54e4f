"""Train the GPT in one case of formats.

The parameters are bf16, and so are activations and arriving gradients. A CPU without bf16 arithmetic takes many times as long.
"""

import ballast
import torch
from loss_training import Plan, Training
from texts import Text
from variants import FINE_TUNING, Case


class Run(Training):
    """One model, its optimizer with the formats of a case, and the text."""

    def __init__(self, case: Case, text: Text, steps: int, start: dict[str, torch.Tensor]):
        plan = Plan(case.task, case.seed, steps)
        model = plan.model(torch.bfloat16)
        if case.task == FINE_TUNING:
            model.load_state_dict(start)
        plain = torch.optim.AdamW(model.parameters(), lr=case.task.learning_rate)
        formats = case.variant
        wrapped = ballast.wrap(plain, model, state_format=formats.state, gradient_format=formats.gradients, threads=1)
        super().__init__(plan, text, model, [wrapped])
