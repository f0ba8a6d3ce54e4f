"""Compiles DeepSpeed's operators before anything is measured: ranks that meet while one of them compiles may time out."""

from deepspeed.accelerator import get_accelerator

for name in ("CPUAdamBuilder", "FusedAdamBuilder", "AsyncIOBuilder", "ShareMemCommBuilder", "PinMemoryBuilder"):
    get_accelerator().get_op_builder(name)().load()
