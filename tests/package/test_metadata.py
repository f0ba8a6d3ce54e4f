"""Tests of what package indexes show: pyproject.toml, and the page that it names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "python" / "PYPI.md").read_text()


def project() -> dict:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or newer has tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_page_of_the_package_is_the_one_checked_here() -> None:
    assert project()["readme"] == "python/PYPI.md"


def test_the_page_links_no_file_of_the_repository() -> None:
    """An index shows the page alone. Its example is the one of README.md, which runs in tests/docs."""
    links = re.findall(r"\]\(([^)]*)\)", PAGE)
    assert [link for link in links if not link.startswith("https://")] == []
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert f"```python\n{example}```" in (ROOT / "README.md").read_text()


def test_the_metadata_say_what_the_package_needs() -> None:
    described = project()
    versions = {found[1] for line in described["classifiers"] if (found := re.search(r"Python :: 3\.(\d+)$", line))}
    oldest = re.fullmatch(r">=3\.(\d+)", described["requires-python"])
    assert oldest and min(map(int, versions)) == int(oldest[1])
    assert "Operating System :: POSIX :: Linux" in described["classifiers"]
    # Build tools refuse a classifier of the licence next to an expression.
    assert described["license"] == "Apache-2.0"
    assert not [line for line in described["classifiers"] if line.startswith("License ::")]
