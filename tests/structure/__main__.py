"""`python3 tests/structure` prints what breaks the rules of the tree it stands in."""

import sys
from pathlib import Path

root = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(root / "tests"))

from structure import rules  # noqa: E402 (found only now)

found = rules.violations(root)
print("\n".join(map(str, found)) or "the structure is as tests/structure/house.py says")
sys.exit(1 if found else 0)
