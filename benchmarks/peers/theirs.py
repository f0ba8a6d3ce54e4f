"""The optimizers that Ballast's AdamW is compared with."""

import torch


class Torch:
    """torch.optim.AdamW(fused=True): one pass over memory."""

    def __init__(self, parameter: torch.Tensor, gradient: torch.Tensor):
        self.parameter = torch.nn.Parameter(parameter)
        self.parameter.grad = gradient
        self._optimizer = torch.optim.AdamW([self.parameter], fused=True)

    def step(self) -> None:
        self._optimizer.step()


class DeepSpeed:
    """DeepSpeedCPUAdam, with torch's default options. Its operator is compiled when the first one is made."""

    def __init__(self, parameter: torch.Tensor, gradient: torch.Tensor):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        self.parameter = torch.nn.Parameter(parameter)
        self.parameter.grad = gradient
        self._optimizer = DeepSpeedCPUAdam([self.parameter], weight_decay=0.01, adamw_mode=True)

    def step(self) -> None:
        self._optimizer.step()


class WithCasts:
    """bf16 training around an fp32 optimizer: the gradient is widened and the parameter narrowed, both into buffers that
    exist already."""

    def __init__(self, optimizer: type, parameter: torch.Tensor, gradient: torch.Tensor):
        self.parameter = parameter
        self._gradient = gradient
        self._fp32_gradient = gradient.float()
        self._optimizer = optimizer(parameter.float(), self._fp32_gradient)

    def step(self) -> None:
        self._fp32_gradient.copy_(self._gradient)
        self._optimizer.step()
        self.parameter.copy_(self._optimizer.parameter.detach())
