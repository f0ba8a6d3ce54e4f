"""Hooks of MkDocs: a line `<!-- generate: NAME ... -->` of a page is replaced by text that reference.py generates.

A line after it that begins with `*In the repository:` is for readers of the Markdown file, and is replaced too."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import reference  # noqa: E402

MARKER = re.compile(r"^<!-- generate: (\w[\w-]*)((?: [\w./-]+)*) -->(?:\n\*In the repository: .+)?$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fill in the generated parts."""
    return MARKER.sub(lambda found: reference.GENERATORS[found[1]](*found[2].split()), markdown)


def on_post_page(output: str, *, page: object, **_: object) -> str:
    """Refuse a page that a browser would complete from the network."""
    loaded = re.search(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(https?:)?//[^>]*>", output)
    if loaded and 'rel="canonical"' not in loaded[0]:
        raise SystemExit(f"{page}: a page must not load anything from the network: {loaded[0]}")
    return output
