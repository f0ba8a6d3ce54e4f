"""The rules of the source tree. Each rule reads a tree and yields its violations."""

import fnmatch
import os
import re
from collections.abc import Iterator
from pathlib import Path

from structure import house, python_rules, source  # noqa: F401 (python_rules registers its rules)
from structure.messages import Message, messages, without_help
from structure.tree import RULES, Tree, Violation, rule


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


@rule("public-api")
def examples_use_the_public_api(tree: Tree):
    for path, text in tree.code():
        for include in source.includes(text):
            if path.startswith("examples/") and include.quoted and not include.path.startswith("examples/"):
                yield path, include.line, f"an example may not include {include.path}: only <ballast/...> and its own headers"


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
            if function.lines > house.FUNCTION_LINES:
                yield path, function.line, f"{function.name} has {function.lines} lines, at most {house.FUNCTION_LINES}"


@rule("parameters")
def functions_take_few_parameters(tree: Tree):
    for path, text in tree.with_suffix(house.CODE_SUFFIXES | {".py"}):
        for function in () if lives_in(path, [house.EMULATION]) else source.functions(path, text):
            if function.parameters > house.PARAMETERS:
                message = f"{function.name} takes {function.parameters} parameters, at most {house.PARAMETERS}"
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


@rule("device-functions")
def device_code_calls_no_host_functions(tree: Tree):
    for path, text in tree.code():
        code = source.without_comments_and_strings(text) if lives_in(path, house.DEVICE_CODE) else ""
        for found in re.finditer(r"(?:std::|__builtin_)(\w+)\s*(?:<[^;(]*>)?\s*\(", code):
            if found[1] not in house.DEVICE_FUNCTIONS:
                yield path, source.line_of(code, found.start()), f"{found[1]}() may be missing where a GPU runs this"


# clang-tidy does not see these, as it reads several files as one.
@rule("unused-name")
def short_names_are_used(tree: Tree):
    for path, text in tree.with_suffix({".cpp", ".cu"}):
        code = source.without_comments_and_strings(text)
        for found in re.finditer(r"\b(?:using\s+(?:\w*::)+(\w+)|namespace\s+(\w+)\s*=[^;]*)\s*;", code):
            name = found[1] or found[2]
            if not re.search(rf"\b{name}\b", code[found.end() :]):
                yield path, source.line_of(code, found.start()), f"{name} is not used in this file"


@rule("developer-path")
def no_paths_of_one_machine(tree: Tree):
    for path, text in tree.files.items():
        for found in re.finditer(house.DEVELOPER_PATH, text):
            yield path, source.line_of(text, found.start()), "a path that exists on one machine only"


def all_messages(tree: Tree, folders: list[str]) -> Iterator[tuple[str, Message]]:
    for path, text in tree.with_suffix(house.CODE_SUFFIXES | {".py"}):
        if any(path.startswith(folder.rstrip("/") + "/") for folder in folders):
            yield from ((path, message) for message in messages(path, text))


@rule("remedy")
def errors_say_what_is_needed(tree: Tree):
    for path, text in tree.with_suffix(house.CODE_SUFFIXES | {".py"}):
        if any(path.startswith(folder.rstrip("/") + "/") for folder in house.CHECKED_MESSAGES):
            for line in without_help(path, text):
                yield path, line, "the error says neither what is needed nor what to change"


@rule("message")
def messages_are_in_plain_english(tree: Tree):
    for path, message in all_messages(tree, house.CHECKED_MESSAGES):
        for form, instead in house.OLD_FORMS.items():
            if found := re.search(form, message.text, re.IGNORECASE):
                yield path, message.line, f'"{found[0]}": write {instead} in "{message.text}"'
