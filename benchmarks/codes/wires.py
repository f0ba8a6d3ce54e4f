"""The cases: what ranks send at stage 3, from each seed."""

from contest import Contest

EXACT = "exact"
WIRES = {
    EXACT: "exact",
    "all in int8": "int8",
    "gradients in int4, all else in int8": {"gather": "int8", "reduce": "int4"},
}
CONTEST = Contest("codes", "what ranks send", tuple(WIRES))
