"""The rules of the source tree. Each rule reads a tree and yields its violations."""

import ast
import fnmatch
import io
import os
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from structure import house, source
from structure.graph import path_between
from structure.messages import Message, messages


class Violation(NamedTuple):
    file: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"


class Tree:
    """The text files below a root by their relative paths, and the names at the top."""

    def __init__(self, root: Path):
        self.top = sorted(set(os.listdir(root)) - house.IGNORED)
        self.files: dict[str, str] = {}
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(set(folders) - house.IGNORED)
            for name in sorted(set(names) - house.IGNORED):
                path = Path(folder, name)
                if path.suffix in house.TEXT_SUFFIXES and not path.is_symlink():
                    self.files[path.relative_to(root).as_posix()] = path.read_text(errors="replace")

    def with_suffix(self, suffixes: set[str]) -> Iterator[tuple[str, str]]:
        return ((path, text) for path, text in self.files.items() if Path(path).suffix in suffixes)

    def code(self) -> Iterator[tuple[str, str]]:
        return self.with_suffix(house.CODE_SUFFIXES)

    def cmake(self) -> Iterator[tuple[str, str]]:
        for path, text in self.files.items():
            if path.endswith("CMakeLists.txt") or path.endswith(".cmake"):
                yield path, re.sub(r"#[^\n]*", "", text)


Rule = Callable[[Tree], Iterator[Violation]]
RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable:
    def register(find: Callable[[Tree], Iterator[tuple[str, int, str]]]) -> Callable:
        RULES[name] = lambda tree: (Violation(file, line, name, message) for file, line, message in find(tree))
        return find

    return register


def violations(root: Path) -> list[Violation]:
    tree = Tree(root)
    return sorted({violation for find in RULES.values() for violation in find(tree)})


def is_public_header(path: str) -> bool:
    return any(path.startswith(folder + "/") for folder in house.PUBLIC_FOLDERS)


def layer_of(path: str) -> str | None:
    if is_public_header(path):
        return house.PUBLIC_HEADERS.get(Path(path).name)
    folders = [layer for layer in house.LAYERS if path.startswith(layer + "/")]
    return max(folders, key=len, default=None)


def file_of(include: source.Include, tree: Tree) -> str:
    """Return the file that an include names, relative to the root."""
    name = include.path.removeprefix("ballast/")
    public = [f"{folder}/{name}" for folder in house.PUBLIC_FOLDERS if f"{folder}/{name}" in tree.files]
    return public[0] if public and name != include.path and not include.quoted else include.path


def reachable(layer: str) -> set[str]:
    return {layer}.union(*(reachable(below) for below in house.LAYERS[layer]))


def lives_in(path: str, home: list[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in home)


def has_keywords(path: str, function: source.Function) -> bool:
    return (path, function.name) in house.KEYWORD_FUNCTIONS


@rule("top-level")
def nothing_else_is_at_the_top(tree: Tree):
    for name in tree.top:
        if name not in house.TOP and name not in {layer.split("/")[0] for layer in house.LAYERS}:
            yield name, 1, "belongs in one of the folders, or in TOP of house.py"


@rule("layering")
def includes_point_down(tree: Tree):
    for path, text in tree.code():
        layer = layer_of(path)
        if layer is None:
            yield path, 1, "this folder is in no layer of tests/structure/house.py"
            continue
        for include in source.includes(text):
            target = layer_of(file_of(include, tree))
            if target is not None and target not in reachable(layer):
                yield path, include.line, f"{layer}/ may not include {include.path}"


@rule("include-path")
def quoted_includes_start_at_the_root(tree: Tree):
    for path, text in tree.code():
        for include in source.includes(text):
            if include.quoted and include.path not in tree.files:
                yield path, include.line, f'"{include.path}" is not a file below the repository\'s root'
            if include.quoted and is_public_header(include.path):
                yield path, include.line, f"write <ballast/{Path(include.path).name}>, as users do"
            if not include.quoted and include.path.startswith("ballast/") and file_of(include, tree) == include.path:
                yield path, include.line, f"<{include.path}> is not a public header"


@rule("public-headers")
def public_headers_include_public_headers_only(tree: Tree):
    for path, text in tree.code():
        if is_public_header(path):
            for include in source.includes(text):
                if include.quoted or not re.fullmatch(r"\w+|ballast/\w+\.h", include.path):
                    yield path, include.line, f"a public header may not include {include.path}"


@rule("cuda-includes")
def cuda_sources_include_little(tree: Tree):
    for path, text in tree.with_suffix({".cu", ".cuh"}):
        for include in source.includes(text):
            file = file_of(include, tree)
            allowed = any(file.startswith(folder + "/") for folder in house.CUDA_SOURCES_MAY_INCLUDE)
            if file in tree.files and not allowed:
                yield path, include.line, f"a .cu file may not include {include.path}"


def _commands(text: str, name: str) -> Iterator[tuple[int, list[str]]]:
    for found in re.finditer(rf"\b{name}\s*\(([^)]*)\)", text):
        yield source.line_of(text, found.start()), found[1].split()


def _libraries(tree: Tree) -> dict[str, str]:
    """Return the layer of each library, which is that of its first source file."""
    layers = {}
    for path, text in tree.cmake():
        for _, words in _commands(text, "ballast_library"):
            sources = [word for word in words if Path(word).suffix in house.CODE_SUFFIXES]
            layers[words[0]] = layer_of(os.path.join(os.path.dirname(path), *sources[:1], ""))
    return layers


@rule("links")
def link_lines_point_down(tree: Tree):
    layers = _libraries(tree)
    for path, text in tree.cmake():
        lines = [*_commands(text, "ballast_library"), *_commands(text, "target_link_libraries")]
        for line, words in lines:
            name = words[0].removeprefix("ballast_") if words else ""
            for target in re.findall(r"\bballast(?:::|_)(\w+)", " ".join(words[1:])):
                if layers.get(name) and layers.get(target) and layers[target] not in reachable(layers[name]):
                    yield path, line, f"{name} ({layers[name]}/) may not link {target} ({layers[target]}/)"


@rule("vendor")
def vendor_headers_have_one_home(tree: Tree):
    for vendor in house.VENDORS:
        home = None
        for path, text in tree.code():
            for include in source.includes(text):
                if not re.fullmatch(vendor.header, include.path) or include.path in tree.files:
                    continue
                if not lives_in(path, vendor.home):
                    yield path, include.line, f"{vendor.name} may be included by {' or '.join(vendor.home)} only"
                elif vendor.one_file and home not in (None, path):
                    yield path, include.line, f"{vendor.name} may be included by one file only: {home} includes it already"
                else:
                    home = path


@rule("home")
def each_thing_has_one_home(tree: Tree):
    for path, text in tree.code():
        code = source.without_comments_and_strings(text)
        for home in house.HOMES:
            if lives_in(path, home.home):
                continue
            for found in re.finditer(home.words, code):
                line = source.line_of(code, found.start())
                yield path, line, f"{home.name} ({found[0].strip(' (')}) belongs in {' or '.join(home.home)}"


@rule("file-size")
def files_are_short(tree: Tree):
    for path, text in tree.with_suffix(house.SIZED_SUFFIXES):
        lines = len(text.splitlines())
        if lines > house.FILE_LINES and Path(path).name != "LICENSE":
            yield path, lines, f"{lines} lines, at most {house.FILE_LINES}"


@rule("function-size")
def functions_are_short(tree: Tree):
    for path, text in tree.with_suffix(house.CODE_SUFFIXES | {".py"}):
        for function in source.functions(path, text):
            lines = function.lines - (function.docstring_lines if has_keywords(path, function) else 0)
            if lines > house.FUNCTION_LINES:
                yield path, function.line, f"{function.name} has {lines} lines, at most {house.FUNCTION_LINES}"


@rule("parameters")
def functions_take_few_parameters(tree: Tree):
    for path, text in tree.with_suffix(house.CODE_SUFFIXES | {".py"}):
        for function in () if lives_in(path, [house.EMULATION]) else source.functions(path, text):
            count = function.parameters - (function.keywords if has_keywords(path, function) else 0)
            if count > house.PARAMETERS:
                message = f"{function.name} takes {count} parameters, at most {house.PARAMETERS}"
                yield path, function.line, message + "; group the rest in a struct"


@rule("in-build")
def every_test_is_built(tree: Tree):
    listed = set()
    for path, text in tree.cmake():
        for _, words in _commands(text, "ballast_tests"):
            listed.update(os.path.join(os.path.dirname(path), words[0], word) for word in words[1:])
    for path in tree.files:
        if fnmatch.fnmatch(path, "tests/*_test.cpp") and path not in listed:
            yield path, 1, "is not named in tests/CMakeLists.txt, so it never runs"


@rule("emulated")
def every_cuda_source_is_emulated(tree: Tree):
    listed = re.findall(r"[\w./]+", " ".join(text for path, text in tree.cmake() if lives_in(path, [house.EMULATION])))
    for path in tree.files:
        if lives_in(path, house.CUDA_SOURCES) and not lives_in(path, house.NOT_EMULATED) and path not in listed:
            yield path, 1, f"is not named in the CMakeLists.txt of {house.EMULATION}, so no test runs it without a GPU"


# clang-tidy does not see these, as it reads several files as one.
@rule("unused-name")
def short_names_are_used(tree: Tree):
    for path, text in tree.with_suffix({".cpp", ".cu"}):
        code = source.without_comments_and_strings(text)
        for found in re.finditer(r"\b(?:using\s+(?:\w*::)+(\w+)|namespace\s+(\w+)\s*=[^;]*)\s*;", code):
            name = found[1] or found[2]
            if not re.search(rf"\b{name}\b", code[found.end() :]):
                yield path, source.line_of(code, found.start()), f"{name} is not used in this file"


def _python_modules(tree: Tree) -> dict[str, str]:
    """Return the file of each module of the package by its name without "ballast.". The package itself is ""."""
    modules = {}
    for path, _ in tree.with_suffix({".py", ".pyi"}):
        if path.startswith(house.PYTHON_PACKAGE + "/"):
            name = path.removeprefix(house.PYTHON_PACKAGE + "/").rpartition(".")[0].replace("/", ".")
            modules[name.removesuffix("__init__").removesuffix(".")] = path
    return modules


def _imported(found: source.Import, modules: dict[str, str]) -> str | None:
    """Return the module of the package that an import loads, or None for other packages."""
    root, _, name = found.module.partition(".")
    if root != "ballast":
        return None
    deeper = f"{name}.{found.name}".strip(".")
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


@rule("developer-path")
def no_paths_of_one_machine(tree: Tree):
    for path, text in tree.files.items():
        for found in re.finditer(house.DEVELOPER_PATH, text):
            yield path, source.line_of(text, found.start()), "a path that exists on one machine only"


def all_messages(tree: Tree, folders: list[str]) -> Iterator[tuple[str, Message]]:
    for path, text in tree.with_suffix(house.CODE_SUFFIXES | {".py"}):
        if any(path.startswith(folder.rstrip("/") + "/") for folder in folders):
            yield from ((path, message) for message in messages(path, text))


@rule("message")
def messages_are_in_plain_english(tree: Tree):
    for path, message in all_messages(tree, house.CHECKED_MESSAGES):
        for form, instead in house.OLD_FORMS.items():
            if found := re.search(form, message.text, re.IGNORECASE):
                yield path, message.line, f'"{found[0]}": write {instead} in "{message.text}"'
