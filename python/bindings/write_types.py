"""Write the types of the extension: `write_types.py FOLDER` writes _core.pyi next to it. pybind11-stubgen finds them in the
signatures of pybind11, which take any number for an int or a float."""

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
