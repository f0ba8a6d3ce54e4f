from collections.abc import Iterator

from torch import Tensor

class Parameter(Tensor): ...

class Module:
    def parameters(self, recurse: bool = True) -> Iterator[Parameter]: ...

class Linear(Module):
    def __init__(self, in_features: int, out_features: int) -> None: ...
