"""The code of docs/migrating.md, by section."""

import re
from pathlib import Path

TEXT = (Path(__file__).parents[1] / "docs" / "migrating.md").read_text(encoding="utf-8")
_, *PARTS = re.split(r"\n## From (.*)\n", TEXT)
SECTIONS = dict(zip(PARTS[::2], PARTS[1::2], strict=True))


def blocks(text, first_line):
    """The Python blocks that begin with a comment."""
    return re.findall(rf"```python\n# {first_line}\n(.*?)```", text, re.DOTALL)
