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
from tests.checkpoint.runs import differences, start, state, train
from tests.ranks import on_ranks
from zeroshard.checkpoint.files import MANIFEST, TENSORS, VALUES

Craft = Callable[[Path], None]

# ------------------------------------------------------------------------------------------ manifests


def edit_tensor(change: Edit) -> Craft:
    """Change the entry of the first tensor of two dimensions that has more than one box."""

    def edit(content: Any) -> None:
        entries = content["tensors"].values()
        change(next(entry for entry in entries if len(entry["boxes"]) > 1 and len(entry["shape"]) == 2))

    return edit_manifest(edit)


def edit_row(at: int, value: Any) -> Craft:
    """Another number in the row of a box: offsets, sizes, rank, first byte."""
    return edit_tensor(lambda entry: entry["boxes"][1].__setitem__(at, value))


def rename(content: Any) -> None:
    name = next(name for name in content["tensors"] if not name.startswith("optimizer/"))
    content["tensors"]["another"] = content["tensors"].pop(name)


def list_outside(directory: Path) -> None:
    """A file elsewhere, which is there."""
    outside = directory / "../outside"
    outside.write_bytes((directory / PART).read_bytes())
    record = {"num_bytes": outside.stat().st_size, "crc32": zlib.crc32(outside.read_bytes())}
    refit(directory, lambda content: content["files"].update({"../outside": record}))


PLACES: dict[str, Craft] = {
    "file outside": list_outside,
    **{
        f"{column} {value!r}": edit_row(at, value)
        for column, at in {"row": 0, "column": 1, "rows": 2, "columns": 3, "rank": 4, "byte": 5}.items()
        for value in (-1, 1 << 40, 1 << 70, 0.5, True)
    },
    **{
        f"{key} {value!r:.20}": edit_tensor(lambda entry, key=key, value=value: entry.update({key: value}))
        for key, values in {
            "shape": ([1 << 62, 1 << 62], [1] * 65, [-1, 3], [0.5, 2], [0, 0], None),
            "dtype": ("quint8", "float64", "load", None),
            "boxes": ([], None, [[]], [3], {}, [[0] * 6] * 3),
        }.items()
        for value in values
    },
    "shape turned": edit_tensor(lambda entry: entry["shape"].reverse()),
    "short row": edit_tensor(lambda entry: entry["boxes"][0].pop()),
    "a box is missing": edit_tensor(lambda entry: entry["boxes"].pop()),
    "an empty entry": edit_manifest(lambda content: content["tensors"].update(x={})),
    "an unlisted file": edit_manifest(lambda content: content["files"].pop("__1_0.distcp") and None),
    "a parameter is missing": edit_manifest(rename),
    "a buffer is missing": edit_manifest(lambda content: content["buffers"].append("another")),
}


def some_parameter(content: Any) -> Any:
    return next(iter(content["parameters"].values()))


def loss_scale(**change: Any) -> dict[str, Any]:
    return {"value": 2.0, "is_dynamic": True, "num_steps": 0} | change


MANIFESTS: dict[str, Craft] = {
    "list": edit_manifest(lambda content: [1]),
    "deep": lambda directory: (directory / MANIFEST).write_text("[" * 100_000) and None,
    "no json": lambda directory: (directory / MANIFEST).write_bytes(b"\x80\x02") and None,
    **{
        f"without {key}": edit_manifest(lambda content, key=key: content.pop(key) and None)
        for key in ("format", "files", "parameters", "global_step", "optimizer", "tensors")
    },
    **{
        f"{key} {value!r}": edit_manifest(lambda content, key=key, value=value: content.update({key: value}))
        for key, values in {
            "format": (99, 1, [2]),
            "files": (-0.5, "x", [[1]], {"x": 1}),
            "parameters": ("x", {"x": 1}),
            "buffers": ("x", [[1]]),
            "global_step": (-7, True, 1 << 60, 1.0, None),
            "skipped_steps": (-1, False),
            "optimizer": (3, []),
            "model": (3, []),
            "loss_scale": (loss_scale(value="x"), loss_scale(is_dynamic="x"), loss_scale(num_steps=-1)),
            "rounding": ({"seed": 1, "step": -1}, {"seed": "x", "step": 1}),
            "data": ({"x": 1}, {"epoch": -1, "position": 0, "seed": 0, "num_samples": 10}),
        }.items()
        for value in values
    },
    "shape": edit_manifest(lambda content: some_parameter(content).update(shape=["1"])),
    "aliases": edit_manifest(lambda content: some_parameter(content).update(aliases=[[]])),
    "directory": edit_manifest(lambda content: content["files"].update({"..": content["files"][VALUES]})),
    "no values": edit_manifest(lambda content: content["files"].pop(VALUES) and None),
}


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


def update(path: str, value: Any) -> Craft:
    """Another value at a place in the values, such as groups/0/lr; `*` is any one key."""

    def change(values: Any) -> None:
        *steps, last = path.split("/")
        for step in steps:
            key = next(iter(values)) if step == "*" else int(step) if step.isdigit() else step
            values = values[key]
        values[int(last) if last.isdigit() else last] = value

    return edit_values(change)


def numpy_state(size: int = 624, position: int = 0, gauss: Any = 0.0) -> list[Any]:
    return ["MT19937", [0] * size, position, 0, gauss]


CONTENTS: dict[str, Craft] = {
    **{
        f"content {made[:10]!r}": replace_values(made)
        for made in (b"[1]", b"{}", b"", b"x", b"[" * 100_000, b'{"a":' * 100_000, b"\x80\x02]q\x00.")
    },
    "no client state": edit_values(lambda values: values.pop("client_state")),
    **{
        f"{path} {number}": update(path, value)
        for path, values in {
            "groups/0/names": (3, None),
            "groups/0": (3, [], {"lr": 1}),
            "scalars/*": (3, []),
            "lr_scheduler": (3, "x"),
            "rng/0": (3, {}),
            "rng/1/torch": ("x", torch.zeros(5056), torch.zeros(5056, dtype=torch.uint8)),
            "rng/0/python": ((3, (1, 2), None), (3, (0,) * 624 + (9999,), None), "x"),
            "rng/0/numpy": (
                *("x", numpy_state(position=1 << 30), numpy_state(position=-5)),
                *(numpy_state(size=9, position=3), numpy_state(gauss="x")),
            ),
            "client_state": (3, []),
        }.items()
        for number, value in enumerate(values)
    },
    **{
        f"inserted {number}": insert(made)
        for number, made in enumerate(
            (
                *({"$call": ["os.system", "true"]}, {"$": 1}, {"$tuple": 3}, {"$set": [[1]]}, {"$dict": [1]}),
                *({"$dict": [[[], 1]]}, {"$tuple": [], "a": 1}, {"$Size": ["x"]}, {"$float": [1]}),
                *({"$dtype": "load"}, {"$dtype": 3}, {"$device": "x"}, {"$int": "z"}, {"$bytes": "x"}),
                *({"$complex": [1, 2, 3]}, {"$Counter": 3}, {"$tensor": {"name": "x"}}, {"$tensor": "0"}),
                {"$tensor": {"name": "0"}},  # a second time
                *({"$parameter": {"name": "x"}}, {"$sparse": {}}),
                {"$sparse": {"layout": "torch.sparse_coo", "parts": [[[5]], [1.0]], "shape": [2]}},
            )
        )
    },
}


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

KINDS = {"places": PLACES, MANIFEST: MANIFESTS, VALUES: CONTENTS, "links": LINKS}


# ------------------------------------------------------------------------------------------- loading


class Small(nn.Module):
    """Has a matrix whose slices lie on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(24, 28), nn.Linear(28, 26), nn.Linear(26, 24)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def loss(engine: nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return engine(torch.randn(4, 24, generator=generator)).square().mean()


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
    engine = start(3, model=Small(), training_data=data, **schedule)
    train(engine, [0], loss)
    engine.save_checkpoint(good, "tag")
    train(engine, [1], loss)
    before, drawn = state(engine), generators()
    for name, craft in KINDS[kind].items():
        bad = damaged(good, craft, "tag.0")
        text = message_of(lambda bad=bad: engine.load_checkpoint(bad))  # type: ignore[misc]
        found += [] if f"{bad / 'tag.0'}/" in text else [f"{name}: {text}"]
        found += [f"{name}: {len(text)} characters"] * (len(text) > 600)
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
    engine = start(3, model=Small())
    train(engine, [0], loss)
    engine.save_checkpoint(tmp_path, "tag")
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
