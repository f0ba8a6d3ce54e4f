"""Ballast's optimizer step on torch tensors, without the Python package: through libballast_torch_bridge.so."""

import ctypes
import os
from pathlib import Path

import torch

FORMATS = ["fp32", "split", "bf16", "compact", "4bit"]  # the order of kernels::StateFormat
DTYPES = [torch.float32, torch.bfloat16, torch.float16]  # the order of DType
MASTER = {"fp32": torch.float32, "split": torch.int16, "bf16": torch.int16, "compact": torch.int8, "4bit": torch.int8}
MOMENT = {"fp32": torch.float32, "split": torch.float32, "bf16": torch.bfloat16, "compact": torch.uint8, "4bit": torch.uint8}
ELEMENTS_OF_A_VALUE = {"4bit": 2}  # elements of a value of MOMENT, where it has more than one
GROUP = 128


class Tensor(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("format", "parameter_dtype", "gradient_dtype")]
    _fields_ += [
        (name, ctypes.c_void_p)
        for name in ("parameter", "gradient", "master", "momentum", "variance", "momentum_scales", "variance_scales")
    ]
    _fields_ += [("count", ctypes.c_uint64)]


class Options(ctypes.Structure):
    _fields_ = [("rule", ctypes.c_char_p)]
    _fields_ += [
        (name, ctypes.c_double)
        for name in ("lr", "weight_decay", "eps", "beta1", "beta2", "lr_decay", "momentum", "dampening")
    ]
    _fields_ += [("nesterov", ctypes.c_int), ("maximize", ctypes.c_int)]


class MuonOptions(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in ("lr", "momentum", "weight_decay", "eps")]
    _fields_ += [("ns_coefficients", ctypes.c_double * 3)]
    _fields_ += [(name, ctypes.c_int) for name in ("nesterov", "ns_steps", "match_rms_adamw", "polar_express")]


def library_path() -> Path:
    root = Path(__file__).resolve().parents[2]
    build = Path(os.environ.get("BALLAST_BUILD", root / "build" / "release"))
    return build / "tests" / "libballast_torch_bridge.so"


def load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path()))
    library.ballast_step.restype = ctypes.c_char_p
    library.ballast_step.argtypes = [
        ctypes.POINTER(Tensor), ctypes.POINTER(Options), ctypes.c_uint64, ctypes.c_uint64
    ]
    library.ballast_muon_step.restype = ctypes.c_char_p
    library.ballast_muon_step.argtypes = [
        ctypes.POINTER(Tensor), ctypes.POINTER(MuonOptions), ctypes.c_uint64, ctypes.c_uint64
    ]
    return library


class State:
    """The optimizer state of one parameter, in one format."""

    def __init__(self, parameter: torch.Tensor, format: str):
        count = parameter.numel()
        groups = (count + GROUP - 1) // GROUP
        self.format = format
        self.parameter = parameter
        moments = -(-count // ELEMENTS_OF_A_VALUE.get(format, 1))
        self.momentum = torch.zeros(moments, dtype=MOMENT[format])
        self.variance = torch.zeros(moments, dtype=MOMENT[format])
        self.momentum_scales = torch.zeros(groups)
        self.variance_scales = torch.zeros(groups)
        self.master = None
        if parameter.dtype != torch.float32:
            wide = format == "fp32"
            self.master = parameter.detach().float().flatten() if wide else torch.zeros(count, dtype=MASTER[format])

    def tensor(self, gradient: torch.Tensor) -> Tensor:
        assert self.parameter.is_contiguous() and gradient.is_contiguous()
        memory = lambda tensor: None if tensor is None else tensor.data_ptr()
        return Tensor(
            FORMATS.index(self.format), DTYPES.index(self.parameter.dtype), DTYPES.index(gradient.dtype),
            memory(self.parameter), memory(gradient), memory(self.master), memory(self.momentum),
            memory(self.variance), memory(self.momentum_scales), memory(self.variance_scales), gradient.numel(),
        )


class Optimizer:
    """A torch-like optimizer: Optimizer("AdamW", parameters, "compact", lr=1e-3, ...). Options have torch's names."""

    def __init__(self, rule: str, parameters, format: str = "fp32", **options):
        self.library = load()
        beta1, beta2 = options.pop("betas", (0.9, 0.999))
        self.options = Options(rule=rule.encode(), beta1=beta1, beta2=beta2, **options)
        self.states = [State(parameter, format) for parameter in parameters]
        self.steps = 0

    def step(self, gradients=None):
        self.steps += 1
        gradients = gradients or [state.parameter.grad for state in self.states]
        for unit, (state, gradient) in enumerate(zip(self.states, gradients)):
            tensor = state.tensor(gradient)
            error = self.library.ballast_step(tensor, self.options, unit, self.steps)
            if error:
                raise RuntimeError(error.decode())


class Muon:
    """A torch-like Muon of matrices. Options have the names and defaults of torch.optim.Muon, and `polar_express`."""

    def __init__(self, parameters, format: str = "fp32", **options):
        self.library = load()
        coefficients = options.pop("ns_coefficients", (3.4445, -4.7750, 2.0315))
        match = options.pop("adjust_lr_fn", None) == "match_rms_adamw"
        defaults = dict(lr=1e-3, momentum=0.95, weight_decay=0.1, eps=1e-7, nesterov=True, ns_steps=5)
        self.options = MuonOptions(
            ns_coefficients=(ctypes.c_double * 3)(*coefficients), match_rms_adamw=match, **(defaults | options)
        )
        self.states = [State(parameter, format) for parameter in parameters]
        self.steps = 0

    def step(self, gradients):
        self.steps += 1
        for state, gradient in zip(self.states, gradients):
            error = self.library.ballast_muon_step(state.tensor(gradient), self.options, gradient.shape[0], self.steps)
            if error:
                raise RuntimeError(error.decode())
