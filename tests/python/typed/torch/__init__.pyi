"""The part of torch that right.py and wrong.py use. mypy takes minutes to read all of torch."""

from torch import nn as nn
from torch import optim as optim

class Tensor: ...
