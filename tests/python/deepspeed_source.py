"""List every key that DeepSpeed reads from a configuration, with its default, from DeepSpeed's source alone.

    python tests/python/deepspeed_source.py DIRECTORY > tests/python/deepspeed_keys.json

DIRECTORY is an unpacked sdist, or a site-packages folder that holds DeepSpeed. Importing DeepSpeed takes torch and a dozen
other packages; reading its source takes none. The reader follows the configuration from `DeepSpeedConfig` through each
function that receives it. It lists each key that is looked up there, and the fields of each pydantic model that receives a
section.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

# The places where a configuration or a section of it enters: file, class, function, expression of the section, its path.
ENTRIES = [
    ("__init__.py", "", "initialize", "config", ""),
    ("runtime/config.py", "DeepSpeedConfig", "__init__", "config", ""),
    ("runtime/config.py", "DeepSpeedConfig", "__init__", "self._param_dict", ""),
    ("runtime/config.py", "DeepSpeedConfig", "_initialize_params", "param_dict", ""),
    ("runtime/config.py", "DeepSpeedConfig", "_do_warning_check", "self._param_dict", ""),
    ("runtime/engine.py", "DeepSpeedEngine", "_configure_basic_optimizer", "optimizer_parameters", "optimizer.params"),
]
# Optimizers that the engine passes the rest of optimizer.params to, through a variable.
OPTIMIZERS = [
    ("ops/adam/fused_adam.py", "FusedAdam"),
    ("ops/adam/cpu_adam.py", "DeepSpeedCPUAdam"),
    ("ops/adagrad/cpu_adagrad.py", "DeepSpeedCPUAdagrad"),
    ("ops/lion/fused_lion.py", "FusedLion"),
    ("ops/lion/cpu_lion.py", "DeepSpeedCPULion"),
]
GETTERS = {"get_scalar_param", "get_list_param", "get_dict_param"}  # (section, key, default)
METHODS = {"get", "pop"}  # section.get(key, default)
COPIES = {"copy", "deepcopy", "dict", "keys", "items"}  # copy a section or iterate over it
NO_DEFAULT = "-"
Keys = dict[str, str]  # maps the path of a key to its default, as Python writes it


class Found(NamedTuple):
    """A class, a function or the value of a constant, and the file whose names it uses."""

    file: Path
    node: ast.AST


class Call(NamedTuple):
    """A function that receives sections or names of keys, by parameter."""

    file: Path
    function: ast.FunctionDef
    owner: ast.ClassDef | None
    places: dict[str, str]
    texts: dict[str, str]

    def reader(self, keys: Keys) -> Reader:
        return Reader(keys, self.file, self.places, self.texts, self.owner)


@functools.cache
def names_of(file: Path) -> dict[str, tuple[Path, Any]]:
    """Map each name of a module to its node, or to the module and the name that it is imported from."""
    names: dict[str, tuple[Path, Any]] = {}
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):  # functions import as well
        if isinstance(node, ast.ImportFrom) and (module := module_of(file, node)):
            for alias in node.names:
                names.update(names_of(module) if alias.name == "*" else {alias.asname or alias.name: (module, alias.name)})
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = (file, node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = (file, node.value)
    return names


def module_of(file: Path, node: ast.ImportFrom) -> Path | None:
    """Return the file of a module of DeepSpeed, None for others."""
    package = next(parent for parent in file.parents if parent.name == "deepspeed")
    folder = package.parent if node.level == 0 else file.parents[node.level - 1]
    path = folder.joinpath(*(node.module or "").split("."))
    files = [each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file() and package in each.parents]
    return files[0] if files else None


def find(file: Path, name: str) -> Found | None:
    at, what = names_of(file).get(name, (file, None))
    if isinstance(what, str):
        return find(at, what) if at != file else None
    return None if what is None else Found(at, what)


def method_of(owner: ast.AST, name: str) -> ast.FunctionDef | None:
    body = owner.body if isinstance(owner, ast.ClassDef) else []
    return next((each for each in body if isinstance(each, ast.FunctionDef) and each.name == name), None)


def called_name(node: ast.AST | None) -> str:
    """Return the last word of the name of a called function."""
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def joined(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


class Reader(ast.NodeVisitor):
    """Follows sections through one function: `places` and `texts` say which expressions are sections, and which are keys."""

    def __init__(self, keys: Keys, file: Path, places: Keys | None = None, texts: Keys | None = None, owner: Any = None):
        self._keys, self._file, self._owner = keys, file, owner
        self._places, self._texts = dict(places or {}), dict(texts or {})

    def place(self, node: ast.AST) -> str | None:
        """Return the path of the section, or of the value, that an expression stands for."""
        if (written := ast.unparse(node)) in self._places:
            return self._places[written]
        if isinstance(node, ast.BoolOp | ast.IfExp):
            parts = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            return next((place for part in parts if (place := self.place(part)) is not None), None)
        if isinstance(node, ast.DictComp):  # {key: section.get(key, {}) for key in (...)}: a part of the section
            return self.place(node.value.func.value) if isinstance(node.value, ast.Call) else None
        if (found := self._looked_up(node)) is not None:
            return found[0]
        if called_name(node) in COPIES:
            assert isinstance(node, ast.Call)
            return self.place(node.args[0] if node.args else getattr(node.func, "value", node.func))
        if isinstance(node, ast.Call) and (call := self._followed(node)):  # a function that returns a section
            returned = [each.value for each in ast.walk(call.function) if isinstance(each, ast.Return) and each.value]
            return call.reader(self._keys).place(returned[0]) if len(returned) == 1 else None
        return None

    def text(self, node: ast.AST) -> str | None:
        """Return the string that an expression is, as far as constants tell."""
        if isinstance(node, ast.Name) and node.id in self._texts:
            return self._texts[node.id]
        if isinstance(node, ast.Name) and (found := find(self._file, node.id)):
            return Reader(self._keys, found.file).text(found.node)
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None

    def value(self, node: ast.AST | None) -> str:
        """Return an expression as text, with the constants that it names in place."""
        if isinstance(node, ast.Name):
            if (found := find(self._file, node.id)) is None:
                return NO_DEFAULT
            return node.id if isinstance(found.node, ast.ClassDef) else Reader(self._keys, found.file).value(found.node)
        if isinstance(node, ast.Attribute) and (found := find(self._file, ast.unparse(node.value))):
            inside = [each for each in getattr(found.node, "body", []) if ast.unparse(each).startswith(f"{node.attr} = ")]
            return ast.unparse(inside[0].value) if inside else ast.unparse(node)
        return NO_DEFAULT if node is None else ast.unparse(node)

    def _looked_up(self, node: ast.AST) -> tuple[str, str] | None:
        """Return the path and the default of one value that is looked up in a section."""
        section: ast.AST | None = None
        key: ast.AST | None = None
        default = NO_DEFAULT
        if isinstance(node, ast.Subscript):
            section, key = node.value, node.slice
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            section, key = node.comparators[0], node.left
        elif isinstance(node, ast.Call) and called_name(node) in GETTERS:
            section, key, default = node.args[0], node.args[1], self.value(node.args[2])
        elif isinstance(node, ast.Call) and called_name(node) in METHODS and isinstance(node.func, ast.Attribute):
            section, key, default = node.func.value, node.args[0], self.value(node.args[1]) if node.args[1:] else "None"
        if section is None or key is None or (place := self.place(section)) is None or (name := self.text(key)) is None:
            return None
        return joined(place, name), default

    def _followed(self, node: ast.Call) -> Call | None:
        """Return the function that a call passes a section to."""
        found, owner = self._callee(node.func)
        function = found and (method_of(found.node, "__init__") if isinstance(found.node, ast.ClassDef) else found.node)
        if found is None or not isinstance(function, ast.FunctionDef):
            return None
        parameters = [each.arg for each in function.args.args if each.arg != "self"]
        given = dict(zip(parameters, node.args))
        defaults = dict(zip(reversed(parameters), reversed(function.args.defaults)))
        places = {name: place for name, each in given.items() if (place := self.place(each)) is not None}
        texts = {name: text for name, each in given.items() if (text := self.text(each)) is not None}
        inside = Reader(self._keys, found.file)
        texts = {name: text for name, each in defaults.items() if (text := inside.text(each)) is not None} | texts
        return Call(found.file, function, owner, places, texts) if places else None

    def _callee(self, function: ast.AST) -> tuple[Found | None, ast.ClassDef | None]:
        """Return the class or function that is called, and the class whose `self` it has."""
        if isinstance(function, ast.Attribute) and ast.unparse(function.value) == "self" and self._owner:
            inside = method_of(self._owner, function.attr)
            return (Found(self._file, inside) if inside else None), self._owner
        found = find(self._file, function.id) if isinstance(function, ast.Name) else None
        return found, found.node if found and isinstance(found.node, ast.ClassDef) else None

    # --- Walking through the function, in its order ---

    def visit(self, node: ast.AST) -> None:
        if found := self._looked_up(node):
            path, default = found
            if self._keys.get(path, NO_DEFAULT) == NO_DEFAULT:
                self._keys[path] = default
        super().visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        if (place := self.place(node.value)) is not None and isinstance(node.targets[0], ast.Name | ast.Attribute):
            self._places.setdefault(ast.unparse(node.targets[0]), place)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._visit_each(node.target, node.iter, node.body)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._visit_each(node.generators[0].target, node.generators[0].iter, [node.value])

    def _visit_each(self, target: ast.AST, over: ast.AST, body: Iterable[ast.AST]) -> None:
        """Visit a loop's body once for each key of a constant, or once if the loop is over something else."""
        if called_name(over) == "items" and isinstance(over, ast.Call):
            over = getattr(over.func, "value", over)
        found = find(self._file, over.id) if isinstance(over, ast.Name) else Found(self._file, over)
        words = getattr(found.node, "keys", None) or getattr(found.node, "elts", []) if found else []
        name = ast.unparse(getattr(target, "elts", [target])[0])
        for word in words or [None]:
            if found and word is not None and (text := Reader(self._keys, found.file).text(word)):
                self._texts[name] = text
            for statement in body:
                self.visit(statement)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        found, _ = self._callee(node.func)
        for section in [each.value for each in node.keywords if each.arg is None]:  # Model(**section)
            if found and isinstance(found.node, ast.ClassDef) and (place := self.place(section)) is not None:
                read_model(self._keys, found, place)
        if call := self._followed(node):
            if called_name(node) not in GETTERS:
                read_function(self._keys, call)


def read_function(keys: Keys, call: Call) -> None:
    reader = call.reader(keys)
    for statement in call.function.body:
        reader.visit(statement)


def read_model(keys: Keys, model: Found, section: str) -> None:
    """List the fields of a pydantic model under each name that a configuration may use, and of the models inside."""
    assert isinstance(model.node, ast.ClassDef)
    reader = Reader(keys, model.file)
    for base in model.node.bases:
        if (inherited := find(model.file, ast.unparse(base))) and ast.unparse(base) != "DeepSpeedConfigModel":
            read_model(keys, inherited, section)
    for field in model.node.body:
        if not isinstance(field, ast.AnnAssign):
            continue
        name, alias, default = ast.unparse(field.target), None, field.value
        if called_name(default) == "Field":
            assert isinstance(default, ast.Call)
            given = {each.arg: each.value for each in default.keywords}
            alias = reader.text(given["alias"]) if "alias" in given else None
            default = default.args[0] if default.args else given.get("default", given.get("default_factory"))
        if called_name(default) == "pp_int":
            default = default.args[0]
        for each in filter(None, (name, alias)):
            keys[joined(section, each)] = reader.value(default)
        for word in re.findall(r"\w*Config\w*", ast.unparse(field.annotation)):
            if inside := find(model.file, word):
                read_model(keys, inside, joined(section, alias or name))


def read(directory: Path) -> Keys:
    """Return the default of each key, by its path."""
    keys: Keys = {}
    package = directory / "deepspeed"
    for path, owner, name, expression, section in ENTRIES:
        scope = find(package / path, owner or name)
        function = scope and (method_of(scope.node, name) if owner else scope.node)
        assert scope and isinstance(function, ast.FunctionDef), f"{path} has no {owner} {name}"
        read_function(keys, Call(package / path, function, scope.node if owner else None, {expression: section}, {}))
    for path, name in OPTIMIZERS:
        found = find(package / path, name)
        function = found and method_of(found.node, "__init__")
        assert isinstance(function, ast.FunctionDef), f"{path} has no {name}"
        for argument, default in zip(function.args.args[2:], function.args.defaults):  # the first are self and the parameters
            keys.setdefault(f"optimizer.params.{argument.arg}", ast.unparse(default))
    return dict(sorted(keys.items()))


def version_of(directory: Path) -> str:
    about = [directory / "PKG-INFO", *directory.glob("deepspeed-*.dist-info/METADATA")]
    found = re.search(r"^Version: (\S+)$", next(file for file in about if file.is_file()).read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


if __name__ == "__main__":
    source = Path(sys.argv[1])
    print(json.dumps({"version": version_of(source), "keys": read(source)}, indent=1))
