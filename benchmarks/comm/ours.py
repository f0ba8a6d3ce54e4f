"""Ballast's communicator on torch tensors, through the C interface of harness/c_interface.cpp."""

import ctypes

import torch

IN_PLACE = "in place"
PATHS = {"fastest": 0, "shared memory": 1, IN_PLACE: 1, "gloo": 2}
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class Library:
    def __init__(self, path: str):
        self.calls = ctypes.CDLL(path)
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self.calls.ballast_comm_open.restype = pointer
        self.calls.ballast_comm_close.argtypes = [pointer]
        self.calls.ballast_comm_shared_memory.restype = pointer
        self.calls.ballast_comm_shared_memory.argtypes = [pointer, size]
        for name in ("all_gather", "reduce_scatter"):
            call = getattr(self.calls, f"ballast_comm_{name}")
            call.restype, call.argtypes = ctypes.c_char_p, [pointer, pointer, pointer, size, number]
        self.calls.ballast_comm_copy.argtypes = [pointer, pointer, size]

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.calls.ballast_comm_copy(to.data_ptr(), source.data_ptr(), to.nbytes)


class Communicator:
    def __init__(self, library: Library, path: str):
        self._calls = library.calls
        self._handle = self._calls.ballast_comm_open(PATHS[path])
        if not self._handle:
            raise RuntimeError(f"cannot open a communicator through {path}")

    def close(self) -> None:
        self._calls.ballast_comm_close(self._handle)

    def shared(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in memory that all ranks read in place. It lasts until the next call."""
        memory = self._calls.ballast_comm_shared_memory(self._handle, tensor.nbytes)
        if not memory:
            raise RuntimeError("cannot share memory: the communicator has none")
        bytes_there = torch.frombuffer((ctypes.c_uint8 * tensor.nbytes).from_address(memory), dtype=torch.uint8)
        return bytes_there.view(tensor.dtype).copy_(tensor)

    def all_gather(self, mine: torch.Tensor, everything: torch.Tensor) -> None:
        self._call("all_gather", mine, everything, mine.numel(), mine.dtype)

    def reduce_scatter(self, everything: torch.Tensor, into: torch.Tensor) -> None:
        self._call("reduce_scatter", everything, into, into.numel(), everything.dtype)

    def _call(self, name: str, source: torch.Tensor, to: torch.Tensor, count: int, dtype: torch.dtype) -> None:
        call = getattr(self._calls, f"ballast_comm_{name}")
        problem = call(self._handle, source.data_ptr(), to.data_ptr(), count, DTYPES[dtype])
        if problem is not None:
            raise RuntimeError(problem.decode())
