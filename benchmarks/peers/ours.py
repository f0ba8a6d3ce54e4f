"""Ballast's AdamW on torch tensors, through the small C interface of bench_adamw.cpp."""

import ctypes
import itertools

import torch

FORMATS = {"fp32": 0, "split": 1, "bf16": 2, "compact": 3, "4bit": 4}
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
MASTER = {"fp32": torch.float32, "split": torch.int16, "bf16": torch.int16, "compact": torch.int8, "4bit": torch.int8}
MOMENTS = {"fp32": torch.float32, "split": torch.float32, "bf16": torch.bfloat16, "compact": torch.int8, "4bit": torch.int8}
WITH_SCALES = ("compact", "4bit")


class Tile(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_int) for name in ("format", "parameter_dtype", "gradient_dtype")]
        + [(name, ctypes.c_void_p) for name in ("parameter", "gradient", "master", "momentum", "variance")]
        + [(name, ctypes.c_void_p) for name in ("momentum_scales", "variance_scales")]
        + [("count", ctypes.c_size_t)]
    )


class Library:
    def __init__(self, path: str, threads: int):
        self._library = ctypes.CDLL(path)
        self._library.ballast_bench_group_size.restype = ctypes.c_size_t
        self._library.ballast_bench_open.restype = ctypes.c_void_p
        self._library.ballast_bench_adamw.restype = ctypes.c_char_p
        self._library.ballast_bench_adamw.argtypes = [ctypes.c_void_p, ctypes.POINTER(Tile), ctypes.c_uint64]
        self.group_size = self._library.ballast_bench_group_size()
        self._handle = self._library.ballast_bench_open(threads)

    def adamw(self, tile: Tile, number: int) -> None:
        problem = self._library.ballast_bench_adamw(self._handle, ctypes.byref(tile), number)
        if problem is not None:
            raise RuntimeError(problem.decode())


class Ballast:
    """One step of AdamW over a parameter and its gradient."""

    def __init__(self, library: Library, format: str, parameter: torch.Tensor, gradient: torch.Tensor):
        count = parameter.numel()
        groups = -(-count // library.group_size)
        self.parameter = parameter
        self._library = library
        self._steps = itertools.count(1)
        moments = -(-count // 2) if format == "4bit" else count
        state = {"momentum": torch.zeros(moments, dtype=MOMENTS[format])}
        state["variance"] = torch.zeros(moments, dtype=MOMENTS[format])
        if parameter.dtype != torch.float32:  # an fp32 parameter is its own master
            master = parameter.float() if format == "fp32" else torch.zeros(count, dtype=MASTER[format])
            state["master"] = master
        if format in WITH_SCALES:
            state["momentum_scales"] = torch.zeros(groups)
            state["variance_scales"] = torch.zeros(groups)
        self._tensors = {"parameter": parameter, "gradient": gradient, **state}  # kept alive while the tile points there
        self._tile = Tile(
            format=FORMATS[format],
            parameter_dtype=DTYPES[parameter.dtype],
            gradient_dtype=DTYPES[gradient.dtype],
            count=count,
            **{name: tensor.data_ptr() for name, tensor in self._tensors.items()},
        )

    def step(self) -> None:
        self._library.adamw(self._tile, next(self._steps))
