"""Details of a suite's cases: written to a file, and drawn by `plot`."""

import argparse
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import suite

PLOT = Path(__file__).with_name("plot")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--details", type=Path, help="also write the tables, one line of JSON for each case")
    parser.add_argument("--plot", type=Path, help="draw memory against throughput (.svg, .png, .pdf)")


def prepare(options: argparse.Namespace) -> None:
    """Install the plotting library before anything is measured."""
    if options.plot:
        subprocess.run([PLOT, "--help"], check=True, stdout=subprocess.DEVNULL)


def keep(rows: Sequence[dict], options: argparse.Namespace) -> None:
    """Write and draw rows, as the options say."""
    if options.details:
        options.details.write_text(suite.lines(rows))
    if options.plot:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.write(suite.lines(rows))
            file.flush()
            subprocess.run([PLOT, file.name, options.plot], check=True)
