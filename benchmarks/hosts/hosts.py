"""Train one GPT of plain torch on imitated hosts with Ballast and with its peers, and compare their use of the links."""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import collectives_between
import losses
import suite
from network import Network, megabytes, require_root, run_isolated, run_ranks
from peers_training import Run, Runs, check_losses, summary
from systems import ALONE, DDP
from trainings import CASES, Case, with_references

RANK = Path(__file__).with_name("trainings.py")


def run_once(case: Case, network: Network, folder: Path, text: Path) -> Run:
    program = [str(RANK), case.name, str(folder), str(text)]
    return summary(run_ranks(case.site, network, program, folder))


def records(case: Case, runs: Runs) -> list[dict]:
    """Return the lines of a case; above 1 is better in all of them."""
    ours, ddp, alone = ([run.seconds for run in runs[side]] for side in (case, case.of(DDP), case.of(ALONE)))
    in_tokens = lambda seconds: case.workload.tokens / seconds
    speed = suite.line(case.name, in_tokens(statistics.median(ours)), "tok/s")
    if case.system.name == ALONE:
        return [speed]
    limits = [max(seconds, case.link_seconds) for seconds in alone]
    sent, needed = [run.sent_bytes for run in runs[case]], [case.needed_bytes] * len(ours)
    return [
        speed if case.system.name == DDP else suite.versus(case.name, DDP, "tok/s", ours, ddp, value_of=in_tokens),
        suite.versus(f"{case.name}, vs. limit", "limit", "tok/s", ours, limits, value_of=in_tokens),
        suite.versus(f"{case.name}, sent", "needed", "MB", sent, needed, value_of=megabytes),
    ]


def measure(cases: list[Case], rounds: int) -> Runs:
    """Train in turn, round after round, in one network after the other."""
    runs: Runs = {}
    with tempfile.TemporaryDirectory(prefix="ballast-hosts-") as folder:
        for site in dict.fromkeys(case.site for case in cases):
            with Network(site.hosts, site.link) as network:
                here = [case for case in cases if case.site == site]
                run = lambda case, network=network: run_once(case, network, Path(folder), Path(folder) / "text")
                runs |= suite.in_turn(here, run, rounds)
    return runs


def arguments() -> argparse.Namespace:
    parser = suite.parser_of("hosts", __doc__, rounds=3)
    parser.add_argument("--collectives", action="store_true", help="time collectives instead of trainings; minutes")
    meaning = "compare losses over whole trainings: DDP vs. exchanges every few steps; half an hour"
    parser.add_argument("--losses", action="store_true", help=meaning)
    parser.add_argument("--steps", type=int, help="of a training with --losses (640 with 3M parameters, 128 with 30M)")
    parser.add_argument("--seeds", type=int, default=1, help=f"trainings of each case of --losses, at most {losses.SEEDS} (1)")
    parser.add_argument("--runs", type=Path, required=True, help="file of the finished trainings of --losses")
    cases = {"--collectives": collectives_between.CASES, "--losses": losses.CASES}
    cases = next((of for flag, of in cases.items() if flag in sys.argv), CASES)
    return suite.choose(parser, cases, lambda case: case.name)


def compare(options: argparse.Namespace) -> None:
    if options.collectives:
        return collectives_between.compare(options.cases, options.rounds)
    if options.losses:
        return losses.compare(options)
    cases = with_references(options.cases)
    runs = measure(cases, options.rounds)
    for case in cases:
        suite.emit("hosts", records(case, runs))
    check_losses("hosts", cases, runs)


def main() -> None:
    options = arguments()
    require_root()
    sys.exit(run_isolated(lambda: compare(options)))


if __name__ == "__main__":
    main()
