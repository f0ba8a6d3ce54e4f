"""Tests that every block of every page of docs/ runs and prints what the page shows."""

import doctest
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from docs.blocks import PAGES, ROOT, blocks_of, pages
from docs.run_page import SHOWN_ONLY, main
from python.wrap.support.ranks import from_fork_server

# The number of blocks of each page that cannot run here. A review sees when a page adds one.
NOT_RUN = {
    "get-started/install.md": 4,  # installation, compilation, and output that depends on the machine
    "guides/fit-a-model.md": 2,  # measures for minutes
    "guides/clusters.md": 5,  # Slurm and several machines
    "guides/kubernetes.md": 2,  # a cluster; tests/python/wrap/test_kubernetes.py runs its program
    "guides/frameworks.md": 8,  # TRL, Ray, Megatron, torchtitan, DTensors, experts, parts of sequences: in tests/python/wrap
    "guides/from-deepspeed.md": 2,  # DeepSpeed's files
    "guides/from-fsdp2.md": 1,
    "guides/hangs.md": 1,  # a mistake
    "guides/nvme.md": 1,  # depends on the drive
    "guides/serving.md": 3,  # vLLM, TRL, and a group of ranks
    "guides/slow-links.md": 1,  # needs two machines
    "reference/cpp.md": 3,  # compilation
}

NEEDS = {  # pages whose code needs more than torch
    "guides/frameworks.md": ("accelerate", "transformers"),
    "guides/lightning.md": ("lightning",),
    "guides/peft-and-qlora.md": ("bitsandbytes", "peft", "transformers"),
    "guides/watching.md": ("mlflow", "tensorboard", "tqdm"),
}


def run(page: Path, environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess:
    """Run a page in a process that has imported torch already."""
    log = folder / "page.log"
    process = from_fork_server().Process(target=run_here, args=(page, environment, log))
    process.start()
    process.join(300)
    process.kill()
    return subprocess.CompletedProcess([page], process.exitcode, stderr=log.read_text())


def run_here(page: Path, environment: dict[str, str], log: Path) -> None:
    os.environ.update(environment)
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
    sys.exit(main([str(page)]))


def runs(page: Path) -> bool:
    return any(block.language not in SHOWN_ONLY and not block.not_run for block in blocks_of(page))


@pytest.mark.parametrize("page", [str(page.relative_to(PAGES)) for page in pages() if runs(page)])
def test_a_page_runs_and_prints_the_output_that_it_shows(page, environment, tmp_path):
    for module in NEEDS.get(page, ()):
        pytest.importorskip(module, reason=f"{module} is not installed: .ci/bootstrap venv frameworks")
    ended = run(PAGES / page, environment, tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_blocks_that_do_not_run_are_counted():
    found = Counter(str(page.relative_to(PAGES)) for page in pages() for block in blocks_of(page) if block.not_run)
    assert dict(found) == NOT_RUN


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("```python\nassert 1 == 2\n```\n", "page.md\", line 2"),
        ("```python\nx = 1\n```\n\n```python\nprint(x + y)\n```\n", "name 'y' is not defined"),
        ('```python\nprint(1)\n```\n\n```text title="Output"\n2\n```\n', "page.md:6: the page shows"),
        ("```console\n$ ballast plan gpt3\n```\n", "page.md:2: ballast plan gpt3 ended with 2"),
        ("```console\n$ python nothing.py\n```\n", "page.md:2: python nothing.py ended with 1"),
        ("```console\n$ ballast --version\nballast 99\n```\n", "page.md:2: the page shows"),
        ("```yaml\nkind: Job\n```\n", "nothing runs 'yaml' blocks"),
        ("```python\n1 / 0\n", "a block has no end"),
    ],
)
def test_a_wrong_page_fails(text, says, environment, tmp_path):
    (tmp_path / "page.md").write_text(text)
    ended = run(tmp_path / "page.md", environment, tmp_path)
    assert ended.returncode == 1
    assert says in ended.stderr


def test_a_right_page_passes(environment, tmp_path):
    (tmp_path / "page.md").write_text(
        '```python title="one.py"\nprint("a  b")\n```\n\n```console\n$ python one.py\na b\n```\n\n'
        '```python\nimport one\n```\n\n```text title="Output"\n...\n```\n\n'
        "<!-- not run: there is no such program -->\n```bash\nno-such-program\n```\n"
    )
    ended = run(tmp_path / "page.md", environment, tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def reference():
    """Return the module that generates the reference pages."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "tools" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference"] = module
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_option_with_its_meaning(reference):
    assert doctest.testmod(reference).failed == 0
    for name, known in (("wrap", "stage"), ("plan", "gpu_memory"), ("Tuning", "verify"), ("Run", "mirror")):
        rows = reference.options_of(name).splitlines()[2:]
        assert any(row.startswith(f"| `{known}` | `") for row in rows)
        assert not any(row.endswith("|  |") for row in rows)  # no option lacks its meaning


def test_each_generated_part_names_its_source_in_the_repository_only(reference):
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "tools" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    filled = 0
    for page in pages():
        text = page.read_text()
        marks = [mark for mark in hooks.MARKER.finditer(text) if not re.search(r"```\w+\n\Z", text[: mark.start()])]
        assert all("*In the repository: " in mark[0] for mark in marks), page
        filled += len(marks)
        assert "*In the repository: " not in hooks.on_page_markdown(text), page
    assert filled == 12


def test_the_reference_has_every_verb_and_code(reference):
    page = reference.command_line()
    assert all(f"## `ballast {verb}`" in page for verb in ("plan", "doctor", "report", "inspect", "verify", "export"))
    assert 'id="B1001"' in reference.error_codes()
