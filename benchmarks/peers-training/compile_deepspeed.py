"""Compile DeepSpeed's operators before anything is measured: if one rank compiles, the others may time out."""

from deepspeed.accelerator import get_accelerator

for name in ("CPUAdamBuilder", "FusedAdamBuilder", "AsyncIOBuilder", "ShareMemCommBuilder", "PinMemoryBuilder"):
    get_accelerator().get_op_builder(name)().load()
