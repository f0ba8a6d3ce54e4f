"""Measure DeepSpeed's async_io, used as its optimizer swapper uses it: deepspeed_aio.py FOLDER TILES BYTES_OF_A_TILE.

Each tensor has a file. The reads of a tile's tensors start together, and its writes start when the reads have ended. The output
is the seconds of the second pass, as JSON."""

import json
import sys
import time
from pathlib import Path

import suite
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

TENSORS = 4  # tensors of a tile: parameter, remainder, two moments


class Swapper:
    def __init__(self, folder: Path, tiles: int, tile_bytes: int):
        # DeepSpeed's default block size, queue depth, single_submit, overlap_events and intra_op_parallelism.
        self._handle = AsyncIOBuilder().load(verbose=False).aio_handle(1 << 20, 8, False, True, 1)
        bytes_of_tensor = tile_bytes // TENSORS // 4096 * 4096
        self._tensors = [
            self._handle.new_cpu_locked_tensor(bytes_of_tensor, torch.empty(0, dtype=torch.uint8)) for _ in range(TENSORS)
        ]
        self._files = [[str(folder / f"tile-{tile}-{tensor}") for tensor in range(TENSORS)] for tile in range(tiles)]

    def _wait(self) -> None:
        if self._handle.wait() != TENSORS:
            raise RuntimeError("DeepSpeed's async_io failed")

    def write(self, tile: int) -> None:
        for tensor, file in zip(self._tensors, self._files[tile]):
            self._handle.async_pwrite(tensor, file)
        self._wait()

    def step(self) -> None:
        for tile, files in enumerate(self._files):
            for tensor, file in zip(self._tensors, files):
                self._handle.async_pread(tensor, file)
            self._wait()
            self.write(tile)


def main() -> None:
    folder, tiles, tile_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    output = suite.own_output()
    swapper = Swapper(folder, tiles, tile_bytes)
    for tile in range(tiles):
        swapper.write(tile)
    swapper.step()
    cpu, start = time.process_time(), time.perf_counter()
    swapper.step()
    print(json.dumps({"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}), file=output)


if __name__ == "__main__":
    main()
