"""Checkpoints made to do harm, their checksums fitting: one error names the file; all else is as before."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.checkpoint.damage import PART, Edit, damaged, edit_manifest, edit_values, message_of, refit
from tests.checkpoint.runs import differences, saved, square_loss, state, train
from tests.ranks import on_ranks
from zeroshard.checkpoint.files import MANIFEST, TENSORS, VALUES

Craft = Callable[[Path], None]

DROP: Any = object()
"""In the place of a value: the key goes."""


def put(path: str, value: Any) -> Edit:
    """Return an edit that puts a value at a place of nested dicts and lists; `*` is the first key."""

    def edit(content: Any) -> Any:
        *steps, last = path.split("/")
        for step in steps:
            content = content[next(iter(content)) if step == "*" else int(step) if step.isdigit() else step]
        key = int(last) if isinstance(content, list) else last
        if value is DROP:
            content.pop(key)
        else:
            content[key] = value

    return edit


def puts(how: Callable[[Edit], Craft], places: dict[str, tuple[Any, ...]]) -> dict[str, Craft]:
    """Return a checkpoint for each value that is put at a place, by the place and the value's number."""
    return {
        f"{path} {n}": how(put(path, value))
        for path, found in places.items()
        for n, value in enumerate(found)
    }


# ------------------------------------------------------------------------------------------ manifests


def list_outside(directory: Path) -> None:
    """A file elsewhere, which is there."""
    outside = directory / "../outside"
    outside.write_bytes((directory / PART).read_bytes())
    record = {"num_bytes": outside.stat().st_size, "crc32": zlib.crc32(outside.read_bytes())}
    refit(directory, lambda content: content["files"].update({"../outside": record}))


WEIGHT = "tensors/1.weight"
"""A tensor of two dimensions with more than one box."""
PLACES = {"file outside": list_outside} | puts(
    edit_manifest,
    {
        **{f"{WEIGHT}/boxes/1/{column}": (-1, 1 << 40, 1 << 70, 0.5, True) for column in range(6)},
        f"{WEIGHT}/shape": ([1 << 62, 1 << 62], [1] * 65, [-1, 3], [0.5, 2], [0, 0], [28, 26], None),
        f"{WEIGHT}/dtype": ("quint8", "bits8", "float64", "load", None),
        f"{WEIGHT}/boxes/1/0": (-1, 1 << 40, 0),  # the box before it begins at 0, too
        f"{WEIGHT}/boxes": ([], None, [[]], [3], {}, [[0] * 6] * 3),
        f"{WEIGHT}/boxes/1": ([0] * 5, DROP),
        WEIGHT: (DROP,),
        "tensors/x": ({},),
        "files/__1_0.distcp": (DROP,),
        "buffers": (["another"],),
    },
)


def loss_scale(**change: Any) -> dict[str, Any]:
    return {"value": 2.0, "is_dynamic": True, "num_steps": 0} | change


MANIFESTS: dict[str, Craft] = {
    "list": edit_manifest(lambda content: [1]),
    "deep": lambda directory: (directory / MANIFEST).write_text("[" * 100_000) and None,
    "no json": lambda directory: (directory / MANIFEST).write_bytes(b"\x80\x02") and None,
    "directory": edit_manifest(lambda content: content["files"].update({"..": content["files"][VALUES]})),
} | puts(
    edit_manifest,
    {
        "format": (DROP, 99, 1, [2]),
        "files": (DROP, -0.5, "x", [[1]], {"x": 1}),
        f"files/{VALUES}": (DROP,),
        "parameters": (DROP, "x", {"x": 1}),
        "parameters/*/shape": (["1"],),
        "parameters/*/aliases": ([[]],),
        "buffers": ("x", [[1]]),
        "tensors": (DROP,),
        "global_step": (DROP, -7, True, 1 << 60, 1.0, None),
        "skipped_steps": (-1, False),
        "optimizer": (DROP, 3, []),
        "model": (3, []),
        "written_by/num_parts": (0, "x"),
        "loss_scale": (loss_scale(value="x"), loss_scale(is_dynamic="x"), loss_scale(num_steps=-1)),
        "rounding": ({"seed": 1, "step": -1}, {"seed": "x", "step": 1}),
        "data": ({"x": 1}, {"epoch": -1, "position": 0, "seed": 0, "num_samples": 10}),
    },
)


# --------------------------------------------------------------------------------------------- values


def replace_values(made: bytes) -> Craft:
    """Another content of the JSON file."""

    def craft(directory: Path) -> None:
        (directory / VALUES).write_bytes(made)
        refit(directory)

    return craft


def insert(made: Any) -> Craft:
    """Any JSON in the place of a value of the user's."""

    def craft(directory: Path) -> None:
        content = json.loads((directory / VALUES).read_bytes())
        content["client_state"]["x"] = made
        replace_values(json.dumps(content).encode())(directory)

    return craft


def numpy_state(size: int = 624, position: int = 0, gauss: Any = 0.0) -> list[Any]:
    return ["MT19937", [0] * size, position, 0, gauss]


INSERTED = (
    *({"$call": ["os.system", "true"]}, {"$": 1}, {"$tuple": 3}, {"$set": [[1]]}, {"$dict": [1]}),
    *({"$dict": [[[], 1]]}, {"$tuple": [], "a": 1}, {"$Size": ["x"]}, {"$float": [1]}),
    *({"$dtype": "load"}, {"$dtype": 3}, {"$device": "x"}, {"$int": "z"}, {"$bytes": "x"}),
    *({"$complex": [1, 2, 3]}, {"$Counter": 3}, {"$tensor": {"name": "x"}}, {"$tensor": "0"}),
    {"$tensor": {"name": "0"}},  # a second time
    *({"$parameter": {"name": "x"}}, {"$sparse": {}}),
    {"$sparse": {"layout": "torch.sparse_coo", "parts": [[[5]], [1.0]], "shape": [2]}},
)
TEXTS = (b"[1]", b"{}", b"", b"x", b"[" * 100_000, b'{"a":' * 100_000, b"\x80\x02]q\x00.")
CONTENTS: dict[str, Craft] = {
    **{f"content {made[:10]!r}": replace_values(made) for made in TEXTS},
    **{f"inserted {number}": insert(made) for number, made in enumerate(INSERTED)},
} | puts(
    edit_values,
    {
        "groups/0/names": (3, None),
        "groups/0": (3, [], {"lr": 1}),
        "scalars/1.weight": (3, []),
        "lr_scheduler": (3, "x"),
        "rng/0": (3, {}),
        "rng/1/torch": ("x", torch.zeros(5056), torch.zeros(5056, dtype=torch.uint8)),
        "rng/0/python": ((3, (1, 2), None), (3, (0,) * 624 + (9999,), None), "x"),
        "rng/0/numpy": (
            *("x", numpy_state(position=1 << 30), numpy_state(position=-5)),
            *(numpy_state(size=9, position=3), numpy_state(gauss="x")),
        ),
        "client_state": (DROP, 3, []),
    },
)


def link(name: str, target: str = "") -> Craft:
    """A link in the place of a file, to a file that is as good."""

    def craft(directory: Path) -> None:
        outside = directory.parent / f"of {name}"
        shutil.copy(directory / name, outside)
        (directory / name).unlink()
        (directory / name).symlink_to(target or outside)

    return craft


LINKS = {name: link(name) for name in (".metadata", VALUES, TENSORS, MANIFEST, PART)} | {
    "to nowhere": link(PART, "nowhere")
}

REMEDIES = (
    "Load an older tag, or copy the file anew",
    "Only its directory may be a link",
    "Load it with what wrote it, ",
    "load with restore_hyperparameters=False",
)
KINDS = {"places": PLACES, MANIFEST: MANIFESTS, VALUES: CONTENTS, "links": LINKS}
"""tests/hf/test_pretrained.py has damaged headers of safetensors, for the same reader."""


# ------------------------------------------------------------------------------------------- loading


def begin(folder: Path, **given: Any) -> Any:
    """An engine over a model with matrices whose slices lie on two ranks, and a checkpoint of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 28), nn.Linear(28, 26), nn.Linear(26, 24))
    return saved(folder, numbers=[0], loss=loss, tag="tag", model=model, **given)


loss = square_loss(24)


def generators() -> Any:
    _, keys, *rest = numpy.random.get_state()
    return random.getstate(), torch.get_rng_state().tolist(), keys.tolist(), rest


@pytest.mark.long_where(kind=[VALUES, "places"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, timeout=300)
def test_a_crafted_checkpoint_is_one_error_that_names_the_file_before_anything_changes(tmp_path, kind):
    """What was not refused as it should be, or changed something."""
    found: list[str] = []
    good = tmp_path / "good"
    data = torch.utils.data.TensorDataset(torch.arange(10))
    schedule = {"lr_scheduler": lambda optimizer: CosineAnnealingLR(optimizer, T_max=9)}
    engine = begin(good, training_data=data, **schedule)
    train(engine, [1], loss)
    before, drawn = state(engine), generators()
    for name, craft in KINDS[kind].items():
        bad = damaged(good, craft, "tag.0")
        text = message_of(lambda bad=bad: engine.load_checkpoint(bad))  # type: ignore[misc]
        found += [] if f"{bad / 'tag.0'}/" in text else [f"{name}: {text}"]
        found += [f"{name}: {len(text)} characters"] * (len(text) > 600)
        found += [f"{name}: no remedy: {text}"] * (not any(remedy in text for remedy in REMEDIES))
        found += [f"{name}: loaded in part: {text}"] * ("in part" in text)
    found += ["generators"] * (generators() != drawn)
    found += differences(state(engine), before)
    engine.load_checkpoint(good)
    assert engine.global_step == 1
    return found


@pytest.mark.long_where(file=[VALUES, TENSORS])
@pytest.mark.parametrize("file", [MANIFEST, VALUES, TENSORS])
@on_ranks(1)
def test_random_bytes_in_a_file_never_end_in_another_kind_of_error(tmp_path, file):
    """Checksums fit again: the checkpoint is refused, or loads with what it then says."""
    engine = begin(tmp_path)
    directory, found = tmp_path / "tag.0", []
    data = (directory / file).read_bytes()
    for seed in range(80):
        pick, flipped = random.Random(seed), bytearray(data)
        for _ in range(pick.choice((1, 1, 2, 8))):
            flipped[pick.randrange(len(data))] = pick.randrange(256)
        (directory / file).write_bytes(flipped)
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError):  # no manifest any more
            refit(directory)
        try:
            engine.load_checkpoint(tmp_path)
        except (RuntimeError, ValueError) as error:
            found += [] if str(tmp_path) in str(error) else [f"{seed}: {error}"]
        except BaseException as error:
            found.append(f"{seed}: {type(error).__name__}: {error}")
    return found
