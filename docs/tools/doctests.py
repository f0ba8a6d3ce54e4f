"""An extension of griffe, which reads docstrings for mkdocstrings: examples become blocks of code."""

import re

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n *\S.*)*", re.MULTILINE)  # an example ends at an empty line


class Doctests(griffe.Extension):
    """Fences every example, which Markdown would take for a quotation."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Change the text of an object's docstring."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(self._fenced, obj.docstring.value)

    def _fenced(self, found: re.Match[str]) -> str:
        indent = found[1]
        return f"\n{indent}```pycon\n{found[0]}\n{indent}```\n"
