"""`python3 tests/structure` prints the violations of the rules in the tree that it is in.

`python3 tests/structure messages [folder ...]` prints all messages of the folders, or of all sources if none is given.
"""

import sys
from pathlib import Path

root = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(root / "tests"))

from structure import house, rules  # noqa: E402 (needs the path above)


def show_messages(folders: list[str]) -> None:
    for path, message in rules.all_messages(rules.Tree(root), folders or house.SOURCES_WITH_MESSAGES):
        print(f"{path}:{message.line}: {message.text}")


def show_violations() -> int:
    found = rules.violations(root)
    print("\n".join(map(str, found)) or "the structure is as tests/structure/house.py says")
    return 1 if found else 0


if sys.argv[1:2] == ["messages"]:
    show_messages(sys.argv[2:])
else:
    sys.exit(show_violations())
