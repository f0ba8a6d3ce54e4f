"""Write the types of the extension, and those of wrapped optimizers: `write_types.py FOLDER` writes _core.pyi next to the
extension, and torch/typing.py below it. pybind11-stubgen finds the former in the signatures of pybind11, which take any number
for an int or a float."""

import re
import sys
from importlib import import_module
from pathlib import Path

from pybind11_stubgen import main

EXACT = {
    r"typing\.SupportsInt \| typing\.SupportsIndex": "int",
    r"os\.PathLike \|": "os.PathLike[str] |",
    r"typing\.SupportsFloat \| typing\.SupportsIndex": "float",
    r"(\w+): typing\.ClassVar\[\w+\]\n": r"\1 = ...\n",  # a value of an enumeration
    r" *@classmethod\n *def __new__\(cls, value\):\n *\.\.\.\n": "",  # that of an enumeration
    r" *__hash__: typing\.ClassVar\[None\] = None\n": "",
}

folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))  # the extension needs no other module of the package
ignored = ["--ignore-unresolved-names", r"ballast\..*", "--ignore-invalid-identifiers", "4bit"]
main(["_core", "--output-dir", str(folder), "--exit-code", *ignored])
stub = folder / "_core.pyi"
text = stub.read_text()
for found, exact in EXACT.items():
    text = re.sub(found, exact, text)
members = {value.name: value.value for value in import_module("_core").StateFormat}  # "4bit" is no name of an attribute
functional = f'StateFormat = enum.Enum("StateFormat", {members})\n'
text = re.sub(r"class StateFormat\(enum\.Enum\):\n(?: {4}.*\n)+", functional, text)
modules = sorted(set(re.findall(r"\b(ballast\.[\w.]+)\.\w+", text)))
imports = "".join(f"import {module}\n" for module in modules)
stub.write_text(text.replace("import typing\n", f"import typing\n{imports}", 1))

# Python's types have no intersections. So each class of torch that wrap() trains has a type, a subclass of it and of
# WrappedOptimizer: `optimizer = ballast.wrap(optimizer, model)` keeps the type of the variable, and has the methods. When
# the program runs, class_for() makes each class.
OPTIMIZERS = ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam"]  # a class comes before its bases
OPTIMIZERS += ["Muon", "Adafactor", "Adamax", "Adadelta", "ASGD", "Rprop"]
HEAD = '''"""Written by write_types.py."""
from collections.abc import Sequence
from typing import ParamSpec, Protocol, overload
import torch
from ballast.torch.optimizer import WrappedOptimizer
Options = ParamSpec("Options")
'''
CALL = "    @overload\n    def __call__(self, {}, /, *_: Options.args, **__: Options.kwargs) -> {}: ...\n"
given = {"optimizers: Sequence[torch.optim.Optimizer]": "list[WrappedOptimizer]"}
given |= {f"optimizer: torch.optim.{name}": f"Wrapped{name}" for name in [*OPTIMIZERS, "Optimizer"]}
classes = "".join(f"class Wrapped{name}(WrappedOptimizer, torch.optim.{name}): ...\n" for name in OPTIMIZERS)
calls = "".join(CALL.format(*pair) for pair in given.items())
wrapped = folder / "torch" / "typing.py"
wrapped.unlink(missing_ok=True)  # it may be a link to a file of an older source
wrapped.write_text(f"{HEAD}{classes}class Wrap(Protocol[Options]):\n{calls}")
