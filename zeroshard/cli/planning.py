"""`zeroshard estimate`: tables for somebody who plans a training run."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from textwrap import fill
from typing import Any

from torch import nn

from zeroshard.config.sections import Config
from zeroshard.hf.skeleton import build_skeleton
from zeroshard.memory.estimate import Estimate, estimate, side_by_side
from zeroshard.memory.typical import typical_sizes
from zeroshard.parameters.counts import count
from zeroshard.tables import format_bytes, format_count, render

_STAGES = range(4)
_NO_BREAK = "\u00a0"
_LINE = 79  # characters of a line of text
_NOTE = (
    "The peak is the time at which most parameters are gathered: a unit that computes, those that are "
    "prefetched, and the root."
)
_NOT_COUNTED = "Activations and temporary buffers come on top and are not counted."


def plan(options: Namespace) -> None:
    """Run `zeroshard estimate`."""
    given = {name: getattr(options, name) for name in ("stage", "precision", "tp")}
    if options.config is not None and any(value is not None for value in given.values()):
        raise ValueError("--config has stage, precision and mesh: leave out --stage, --precision and --tp")
    model = build_skeleton(options.model) if isinstance(options.model, Path) else options.model
    configs = _configs(options)
    found = {
        (num_ranks, config.stage): estimate(
            model,
            num_ranks,
            config,
            optimizer_bits=options.optimizer_bits,
            num_tokens=options.tokens,
        )
        for num_ranks in options.ranks
        for config in configs
    }
    note = _NOTE if options.tokens else f"{_NOTE} {_NOT_COUNTED}"
    lines = fill(_about(model), _LINE).replace(_NO_BREAK, " "), _about_training(configs[0], options)
    print(*lines, "", _table(found), "", fill(note, _LINE), sep="\n")


def _configs(options: Namespace) -> list[Config]:
    if options.config is not None:
        return [Config.from_file(options.config)]
    stages = _STAGES if options.stage is None else [options.stage]
    given: dict[str, Any] = {} if options.precision is None else {"precision": options.precision}
    if options.tp is not None:
        given["mesh"] = {"tp": options.tp}
    return [Config.parse({"stage": stage, **given}) for stage in stages]


def _table(found: dict[tuple[int, int], Estimate]) -> str:
    """Return all rows for stages or numbers of ranks side by side; the peaks alone if both are several."""
    ranks, stages = sorted({num for num, _ in found}), sorted({stage for _, stage in found})
    if len(ranks) == 1:
        return side_by_side(_of(ranks[0]), {f"stage {s}": found[ranks[0], s] for s in stages})
    if len(stages) == 1:
        return side_by_side(f"stage {stages[0]}", {_of(num): found[num, stages[0]] for num in ranks})
    rows = [(_of(num), *(format_bytes(found[num, s].peak) for s in stages)) for num in ranks]
    return render("total at the peak, for each rank", ("", *(f"stage {s}" for s in stages)), rows)


def _of(num_ranks: int) -> str:
    return f"{num_ranks:,} rank{'' if num_ranks == 1 else 's'}"


def _about(model: nn.Module | int) -> str:
    if isinstance(model, nn.Module):
        num = count(model.parameters())
        return f"{type(model).__name__} with {num:,} parameters"
    sizes = typical_sizes(model)
    if not sizes.depth:
        return f"{model:,} parameters, gathered all at once"
    tables = "embedding, which is the head too," if sizes.is_tied else "embedding and head"
    return (
        f"{model:,} parameters, taken as a typical language model: {sizes.depth} blocks of "
        f"{_count(sizes.blocks[0])}, {tables} of {_count(sizes.embedding)} "
        f"(width {sizes.width:,}, vocabulary {sizes.embedding // sizes.width:,}). "
        "A config.json in place of the number is exact."
    )


def _count(num: int) -> str:
    """Return a number whose unit stays on the same line."""
    return format_count(num).replace(" ", _NO_BREAK)


def _about_training(config: Config, options: Namespace) -> str:
    dtype = config.precision.param_dtype
    name = "float32" if dtype is None else str(dtype).removeprefix("torch.")
    main = config.precision.main_dtype
    main_name = "float32" if main is None else str(main).removeprefix("torch.")
    divided = f", layers divided over {config.mesh.tp} tensor ranks" if config.mesh.tp > 1 else ""
    tokens = f", {options.tokens:,} tokens in a micro-batch" if options.tokens else ""
    states = f"Adam's states in {options.optimizer_bits} bits"
    others = {str(dtype).removeprefix("torch.") for dtype in dict(config.precision.overrides or ()).values()}
    name = f"{name} and by name in {', '.join(sorted(others))}" if others else name
    about = f"computed in {name}, main parameters in {main_name}, {states}{divided}{tokens}"
    return fill(about, _LINE)
