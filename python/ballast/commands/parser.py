"""An argument parser that offers the nearest name for an unknown option."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations, whose examples keep their lines."""

    def __init__(self, **given: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **given)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        positional = {f"--{action.dest}" for action in self._actions if not action.option_strings}
        for word in unknown:
            if word.split("=")[0] in positional:
                self.error(f"there is no option {word}: the {word.split('=')[0].lstrip('-')} is given without a name")
            near = difflib.get_close_matches(word.split("=")[0], self._option_string_actions, n=1, cutoff=0.5)
            self.error(f"there is no option {word}" + (f'; did you mean "{near[0]}"?' if near else ""))
        return found, unknown
