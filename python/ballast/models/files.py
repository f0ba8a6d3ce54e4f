"""Read models from JSON files: a configuration, shapes by name, or several of them by name."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ballast.checks import NEXT_LINE, one_of, refuse
from ballast.models.known import KNOWN

HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(?<!\.json)")  # owner/model
FORMS = "a configuration with a model_type, shapes by name, or several of either by name"


def read_model(location: str) -> Mapping[str, Any]:
    """Return the configuration or the shapes in a JSON file, or the configuration in a folder. `FILE.json:NAME` is one of
    several models in a file."""
    path, name = _path_and_name(location)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        _refuse_missing(location, path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        refuse(f"{path} is not JSON", where=str(problem), needed="a config.json of transformers")
    if not isinstance(found, dict):
        refuse(f"{path} has no model: it is no JSON object", needed=FORMS)
    return _named(found, name, path)


def _refuse_missing(location: str, path: Path) -> NoReturn:
    """Refuse what is neither a file nor a known name. For another model than a path, say how to get its configuration."""
    needed = f"one of {len(KNOWN)} known names (ballast plan --help lists them), or the path of a model's config.json"
    is_name = "/" not in location and ".json" not in location
    if not is_name and not HUB_NAME.fullmatch(location):
        refuse(f"{path} does not exist", needed=needed)
    near = difflib.get_close_matches(location.lower().rpartition("/")[2], KNOWN, n=3, cutoff=0.5)
    words = ["Did you mean " + " or ".join(f'"{name}"' for name in near) + "?"] if near else []
    command = f'"hf download {"OWNER/NAME" if is_name else location} config.json"'
    words.append(f"For a model of the Hugging Face Hub, {command} prints the path of its configuration: plan with that path.")
    what = f'there is no known model "{location}"' if is_name else f"{path} does not exist"
    refuse(what, needed=needed, remedy=NEXT_LINE.join(words))


def is_config(found: Mapping[str, Any]) -> bool:
    """Return whether this is a configuration, and not shapes.

    >>> is_config({"model_type": "vit"}), is_config({"h.0.weight": [4, 4]})
    (True, False)
    """
    return any(key in found for key in ("model_type", "vocab_size", "architectures"))


def _path_and_name(location: str) -> tuple[Path, str]:
    before, colon, name = location.rpartition(":")
    return (Path(before), name) if colon and not Path(location).exists() else (Path(location), "")


def _named(found: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    if name:
        chosen = found[one_of(f"model in {path}", name, found)]
        if not isinstance(chosen, Mapping):
            refuse(f"{name} in {path} is no model", needed=FORMS)
        return chosen
    if not is_config(found) and any(isinstance(part, Mapping) and is_config(part) for part in found.values()):
        needed = f"one of {', '.join(f'{path}:{each}' for each in found)}"
        refuse(f"cannot choose a model: {path} has {len(found)}", needed=needed)
    other = next((key for key, part in found.items() if not isinstance(part, (list, Mapping))), None)
    if not is_config(found) and other is not None:
        refuse(f"{path} has no model: {other} is {found[other]!r}", needed=FORMS)
    return found
