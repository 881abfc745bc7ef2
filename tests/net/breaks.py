"""All breaks, as breaks.txt has them:

## zeroshard/a file that is damaged
a_name: The behaviour that is broken. After a change of the code it shows where the break belongs.
-a text that stands once in the file
+its replacement; a break without one deletes the text
  a test that must find it: a name, an argument of pytest (a file, or file::test), or "seed 12" of the fuzz
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.net.runner import Break


def _read(text: str) -> Iterator[Break]:
    for of_file in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        file, breaks = of_file.rstrip().split("\n", 1)
        for part in breaks.split("\n\n"):
            head, *lines = part.split("\n")
            name, says = head.split(": ", 1)
            find, replace, tests = ([line[1:] for line in lines if line[0] == kind] for kind in "-+ ")
            own = {"find": "\n".join(find), "replace": "\n".join(replace)}
            yield Break(name=name, says=says, file=file, tests=tuple(map(str.strip, tests)), **own)


BREAKS = tuple(_read(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")))
