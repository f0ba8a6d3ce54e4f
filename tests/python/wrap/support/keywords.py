"""The keywords of ballast.wrap() for the tables of tests, which are flat: they name options of ballast.Tuning and ballast.Run
next to those of wrap() itself."""

from typing import Any

import ballast
from ballast.schema import options_of


def keywords(**options: Any) -> dict[str, Any]:
    tuning = {name: options.pop(name) for name in options_of(ballast.Tuning) if name in options}
    run = {name: options.pop(name) for name in options_of(ballast.Run) if name in options}
    if tuning:
        options["tuning"] = ballast.Tuning(**tuning)
    if run:
        options["run"] = ballast.Run(options.get("run", ""), **run)
    return options
