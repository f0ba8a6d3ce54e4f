"""The class that pickles of models have in the place of hooks of a training. Its name stays, so that they can be read."""

from __future__ import annotations

from typing import Any


class Nothing:
    """Does nothing when a module is called."""

    def __call__(self, *_: Any) -> None:
        pass
