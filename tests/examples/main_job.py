"""Run the main job, examples/finetune.py, on this rank."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import zeroshard

EXAMPLES = Path(__file__).parents[2] / "examples"


class Ended(NamedTuple):
    """A run of the example on one rank.

    - code: the argument of sys.exit; None for a run that came to its end.
    - drawn: the history that the plot was given: evaluations and losses.
    """

    code: Any
    printed: str
    drawn: list[Any]


def finetune(folder: str, *arguments: str, dies_at: int | None = None, draws: bool = False) -> Ended:
    """Run the example in this process, from `folder`; raise in the backward of the step `dies_at`.

    Few runs draw, which takes seconds.
    """
    drawn: list[Any] = []
    backward = zeroshard.Engine.backward

    def dying(engine: zeroshard.Engine, loss: torch.Tensor) -> torch.Tensor:
        if engine.global_step == dies_at:
            raise SystemExit("died")
        return backward(engine, loss)

    with example_modules(), contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        import report

        save = report.save_plot
        patch.setattr(report, "save_plot", lambda *own: drawn.extend(own[1][:2]) or (draws and save(*own)))
        patch.setattr(zeroshard.Engine, "backward", dying)
        patch.setattr(sys, "argv", ["finetune.py", *arguments])
        patch.setenv("XDG_CACHE_HOME", str(Path(folder, "cache")))
        patch.setenv("COLUMNS", "120")
        printed, code = io.StringIO(), None
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                runpy.run_path(str(EXAMPLES / "finetune.py"), run_name="__main__")
            except SystemExit as end:
                code = end.code
    return Ended(code, printed.getvalue(), drawn)


@contextlib.contextmanager
def example_modules() -> Iterator[None]:
    """Import the modules beside the example anew: they read the rank from the environment."""
    names = [file.stem for file in EXAMPLES.glob("*.py")]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}  # other tests hold them
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
