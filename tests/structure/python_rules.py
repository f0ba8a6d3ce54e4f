"""The rules of the Python package: its layers, and where it may name torch's private parts and devices."""

import ast
import fnmatch
import io
import tokenize

from structure import house, source
from structure.graph import path_between
from structure.tree import Tree, rule


def _python_modules(tree: Tree) -> dict[str, str]:
    """Return the file of each module of the package by its name without "ballast.". The package itself is ""."""
    modules = {}
    for path, _ in tree.with_suffix({".py"}):
        if path.startswith(house.PYTHON_PACKAGE + "/"):
            name = path.removeprefix(house.PYTHON_PACKAGE + "/").rpartition(".")[0].replace("/", ".")
            modules[name.removesuffix("__init__").removesuffix(".")] = path
    return modules


def _imported(found: source.Import, modules: dict[str, str]) -> str | None:
    """Return the module of the package that an import loads, or None for other packages and for the extension."""
    root, _, name = found.module.partition(".")
    deeper = f"{name}.{found.name}".strip(".")
    if root != "ballast" or deeper == house.PYTHON_EXTENSION:
        return None
    return deeper if deeper in modules else name


def _python_graph(tree: Tree, modules: dict[str, str]) -> dict[str, list[tuple[str, int]]]:
    """Return for each module the modules that it imports, with the lines."""
    graph = {}
    for module, path in modules.items():
        found = [(_imported(each, modules), each.line) for each in source.python_imports(tree.files[path])]
        graph[module] = [(target, line) for target, line in found if target is not None and target != module]
    return graph


def _python_layer(module: str) -> int | None:
    for number, patterns in enumerate(house.PYTHON_LAYERS.values()):
        if any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns):
            return number
    return None


@rule("python-layers")
def python_imports_point_down(tree: Tree):
    modules, names = _python_modules(tree), [*house.PYTHON_LAYERS]
    for module, imports in _python_graph(tree, modules).items():
        layer = _python_layer(module)
        if layer is None:
            yield modules[module], 1, "this module is in no layer of PYTHON_LAYERS in tests/structure/house.py"
            continue
        for target, line in imports:
            above = _python_layer(target)
            if above is not None and above > layer:
                message = f"{module or 'ballast'} ({names[layer]}) may not import {target or 'ballast'} ({names[above]})"
                yield modules[module], line, message


@rule("python-circles")
def python_imports_form_no_circle(tree: Tree):
    modules = _python_modules(tree)
    graph = _python_graph(tree, modules)
    for module, imports in graph.items():
        for target, line in imports:
            path = path_between(graph, target, module)
            if path:
                circle = " -> ".join(each or "ballast" for each in [module, *path])
                yield modules[module], line, f"a circle of imports: {circle}"


def _is_private(name: str) -> bool:
    return any(word.startswith("_") and not word.startswith("__") for word in name.split("."))


def _private_to_torch(node: ast.AST) -> str | None:
    """Return the name that a node uses if it is private to torch, or None."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        return next((f"{node.module}.{each.name}" for each in node.names if _is_private(f"{node.module}.{each.name}")), None)
    if isinstance(node, ast.Import):
        return next((each.name for each in node.names if each.name.startswith("torch.") and _is_private(each.name)), None)
    if isinstance(node, ast.Attribute):
        name = ast.unparse(node)
        if node.attr in house.PRIVATE_TO_TORCH or (name.startswith("torch.") and _is_private(node.attr)):
            return name
    if isinstance(node, ast.Constant) and node.value in house.PRIVATE_TO_TORCH:  # getattr(parameter, "...")
        return str(node.value)
    return None


@rule("private-torch")
def private_torch_has_one_home(tree: Tree):
    for path, text in tree.with_suffix({".py"}):
        if not path.startswith(house.PYTHON_PACKAGE + "/") or path == house.TORCH_COMPAT:
            continue
        for node in ast.walk(ast.parse(text)):
            name = _private_to_torch(node)
            if name is not None:
                yield path, node.lineno, f"{name} is private to torch, and belongs in {house.TORCH_COMPAT}"


@rule("torch-gpu")
def torch_gpus_have_one_home(tree: Tree):
    for path, text in tree.with_suffix({".py"}):
        if not path.startswith(house.PYTHON_PACKAGE + "/") or path == house.TORCH_GPU:
            continue
        before = tokenize.NEWLINE
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            is_docstring = token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT)
            if token.type not in (tokenize.COMMENT, tokenize.NL):
                before = token.type
                if "cuda" in token.string and not is_docstring:
                    yield path, token.start[0], f"{token.string} names torch's GPU, and belongs in {house.TORCH_GPU}"


@rule("torch-device")
def tensors_are_made_on_a_named_device(tree: Tree):
    for path, text in tree.with_suffix({".py"}):
        for node in ast.walk(ast.parse(text)) if path.startswith(house.PYTHON_PACKAGE + "/") else ():
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name in house.TORCH_FACTORIES and all(each.arg not in ("device", None) for each in node.keywords):
                yield path, node.lineno, f"{name}() without device= is on the device of torch.set_default_device()"
