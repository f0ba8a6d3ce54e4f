"""Compile DeepSpeed's operators before anything is measured: if one rank compiles, the others may time out."""

import os
from pathlib import Path

from deepspeed.accelerator import get_accelerator

# A run that was stopped while it compiled leaves a lock, which torch would wait for.
for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/lock"):
    lock.unlink()

for name in ("CPUAdamBuilder", "FusedAdamBuilder", "AsyncIOBuilder", "ShareMemCommBuilder", "PinMemoryBuilder"):
    get_accelerator().get_op_builder(name)().load()
