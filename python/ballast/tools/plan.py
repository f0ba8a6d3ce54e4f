"""`ballast plan`: find out whether a model fits a machine, and how fast it trains."""

from __future__ import annotations

import argparse
import inspect
import re
from dataclasses import fields, replace
from typing import Any

from ballast import _core
from ballast.checks import refuse, texts_by_name
from ballast.errors import OutOfMemoryError
from ballast.models.known import KNOWN
from ballast.new_files import output_path, write_output
from ballast.options import Options
from ballast.outer.options import outer_from_text
from ballast.planning.hardware import GPUS, Rates
from ballast.planning.planner import best, searched, unbeaten
from ballast.planning.request import PlanRequest, request_plan
from ballast.planning.result import Plan, wrapped
from ballast.planning.suggestions import faster
from ballast.schema import option_name, options_of, signature_of
from ballast.tools import Answer, add_command
from ballast.tools.plan_page import draw_front, front_rows, page

EXAMPLES = """\
plan llama-70b --ranks 8 --gpu h100 --host-memory 2TiB --drive-space 30TB
plan path/to/config.json --ranks 2 --gpu rtx4090 --host-memory 128GiB --offload host --tokens 4096
plan llama-8b --ranks 1 --gpu rtx4090 --host-memory 128GiB --tokens 2048 --json
plan models.json:small --ranks 2 --gpu l4 --tokens 1024 --sequence 1024
plan llama-8b --ranks 2 --measured this-machine.json
plan llama-8b --ranks 8 --gpu h100 --price 2.5 --train-tokens 15T --plot front.svg --html plan.html
"""

MODEL = (
    "the config.json of a model, its folder, shapes by name in a JSON file, one of several models in a file (FILE.json:NAME), "
    f"or one of {', '.join(KNOWN)}"
)
COST = ("price", "train_tokens")
NUMBERS = {"int": int, "float": float}
METAVARS = {"int": "N", "Count": "N", "float": "X", "Size": "SIZE", "str": "NAME"}
NAMES = {"gpu": GPUS, "optimizer": _core.optimizers()}  # names that help lists


def add_to(commands: Any) -> None:
    about = "Find out whether a model fits a machine, and how fast it trains there. Needs no GPU."
    parser = add_command(commands, plan, "find out whether a model fits a machine", about, EXAMPLES)
    parser.add_argument("model", help=MODEL)
    cost = parser.add_argument_group("cost")
    for keyword in signature_of(Options):
        if keyword.name != "rates":
            _add_flag(cost if keyword.name in COST else parser, keyword)
    help = f"replace a rate, such as read=3GB/s: {', '.join(field.name for field in fields(Rates))}"
    parser.add_argument("--rate", dest="rates", action="append", metavar="NAME=RATE", help=help)
    files = parser.add_argument_group("files")
    help = "draw memory against throughput: all placements, the best ones joined, and the plan"
    files.add_argument("--plot", metavar="FILE.svg", help=help)
    help = "write a page with the plan, the same drawing, the memory by owner, and the timeline of the simulated step"
    files.add_argument("--html", metavar="FILE.html", help=help)
    parser.add_argument("--program", action="store_true", help="print only the step, as the engine runs it")


def _add_flag(group: Any, keyword: inspect.Parameter) -> None:
    options = options_of(Options)
    option = options[keyword.name]
    flags = {f"`{name}`": option_name(name, as_flags=True) for name in options}
    help = re.sub(r"`\w+`", lambda found: flags.get(found[0], found[0]), option.meaning).replace("%", "%%")
    flag = option_name(keyword.name, as_flags=True)
    if keyword.annotation == "bool":
        group.add_argument(flag, action="store_true", default=None, help=help)
        return
    help += f": {', '.join(NAMES[keyword.name])}" if keyword.name in NAMES else ""
    help += "" if option.default is None or "default" in help else f"; default: {option.default}"
    kind = keyword.annotation.removesuffix(" | None")
    group.add_argument(flag, type=NUMBERS.get(kind, str), metavar=option.metavar or METAVARS[kind], help=help)


def plan(chosen: argparse.Namespace) -> Answer:
    """Return the plan, and a table of plans with more or less memory."""
    if chosen.program and (chosen.plot or chosen.html):
        refuse("cannot write a drawing or a page with --program, which only prints the step", remedy="Leave out --program.")
    plot = output_path("--plot", chosen.plot, ".svg") if chosen.plot is not None else None
    html = output_path("--html", chosen.html, ".html") if chosen.html is not None else None
    given = {name: value for name in options_of(Options) if (value := getattr(chosen, name)) is not None}
    if chosen.rates:
        given["rates"] = _rates(chosen.rates)
    if "outer" in given:
        given["outer"] = outer_from_text(given["outer"])
    request = replace(request_plan(chosen.model, **given), as_flags=True)  # advice names flags
    found = _best(request, as_json=chosen.json or chosen.program)
    if chosen.program:
        program = found.program()
        return Answer(program, {"program": program.splitlines()})
    plans = searched(request, also=found, fitting=not (plot or html))
    front = unbeaten(plans, also=found)
    if plot:
        write_output(plot, draw_front(plans, front, found).svg(alone=True))
    if html:
        write_output(html, page(plans, front, found))
    settings = faster(request, found)
    content = {"plan": found.to_dict(), "pareto_front": [each.to_dict() for each in front], "faster": settings}
    lines = [line for each in settings for line in wrapped(each, first="  ", indent=" " * 6)]
    advice = ["", "faster with one other setting (each was tried)", *lines] if lines else []
    return Answer("\n".join([found.text(), "", table(front, found), *advice]), content)


def _best(request: PlanRequest, *, as_json: bool) -> Plan:
    """Return the plan. Where nothing fits, say so first."""
    try:
        return best(request)
    except OutOfMemoryError:
        if not as_json:
            print("fits: no", flush=True)
        raise


def _rates(words: list[str]) -> dict[str, str]:
    for word in words:
        if "=" not in word:
            refuse(f"cannot read --rate {word}: it has no '='", needed="a name and a rate, such as read=3GB/s")
    return texts_by_name("--rate", ",".join(words))


def table(plans: list[Plan], plan: Plan) -> str:
    """Return a table of memory and time, with one plan on each line. It has the tiers that one of the plans uses."""
    tiers = [tier for tier in plan.memory if any(each.bytes_in(tier) for each in plans)]
    names = {"device": plan.rank_device, "host": "host", "nvme": "drives"}
    heads = [*(names[tier] for tier in tiers), "step", "tokens/s", *(["cost/Mtok"] if plan.price is not None else [])]
    lines = ["time for memory (fastest first; * is the plan above)", "  ".join([" ", *map(_column, heads), "placement"])]
    for each, (*cells, how) in zip(plans, front_rows(plans, tiers)):
        before = "  ".join(["*" if each is plan else " ", *map(_column, cells), ""])
        lines += wrapped("as above" if each is plan else how, first=before, indent=" " * len(before))
    return "\n".join(lines)


def _column(cell: str) -> str:
    return f"{cell:>9}"
