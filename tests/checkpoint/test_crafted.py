"""Checkpoints made to do harm, their checksums fitting: one error names the file; all else is as before."""

from __future__ import annotations

import json
import random
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.damage import PART, Edit, Run, damaged, edit_manifest, edit_values, message_of, refit
from tests.checkpoint.peaks import growth, needs_linux
from tests.ranks import on_ranks
from zeroshard.checkpoint.files import MANIFEST, TENSORS, VALUES
from zeroshard.checkpoint.places import Box, StoredBox, StoredTensor, tile
from zeroshard.checkpoint.values import read_values, to_files

# ------------------------------------------------------------------------------------------ manifests


def tensor(content: Any) -> Any:
    """The entry of the first tensor of two dimensions that has more than one box."""
    entries = content["tensors"].values()
    return next(entry for entry in entries if len(entry["boxes"]) > 1 and len(entry["shape"]) == 2)


def edit_tensor(change: Edit) -> Callable[[Path], None]:
    return edit_manifest(lambda content: change(tensor(content)) and None)


def edit_row(at: int, value: Any) -> Callable[[Path], None]:
    """Another number in the row of a box: offsets, sizes, rank, first byte."""

    def change(entry: Any) -> None:
        entry["boxes"][1][at] = value

    return edit_tensor(change)


def overlap(entry: Any) -> None:
    """As many elements as before, but a row twice and another one not at all."""
    box = entry["boxes"][1]
    box[0] -= 1


def rename(content: Any) -> None:
    name = next(name for name in content["tensors"] if not name.startswith("optimizer/"))
    content["tensors"]["another"] = content["tensors"].pop(name)


def list_outside(path: str) -> Callable[[Path], None]:
    """A file elsewhere, which is there."""

    def craft(directory: Path) -> None:
        outside = directory / path
        outside.write_bytes((directory / PART).read_bytes())
        record = {"num_bytes": outside.stat().st_size, "crc32": zlib.crc32(outside.read_bytes())}
        refit(directory, lambda content: content["files"].update({path: record}))

    return craft


PLACES: dict[str, Callable[[Path], None]] = {
    "file outside": list_outside("../outside"),
    "file by its whole path": lambda directory: list_outside(f"{directory.parent}/outside")(directory),
    **{
        f"{column} {value!r}": edit_row(at, value)
        for column, at in {"row": 0, "column": 1, "rows": 2, "columns": 3, "rank": 4, "byte": 5}.items()
        for value in (-1, 1 << 40, 1 << 70, 0.5, True, None, "1", [1])
    },
    **{
        f"shape {value!r}": edit_tensor(lambda entry, value=value: entry.update(shape=value))
        for value in ([1 << 62, 1 << 62], [1] * 65, [-1, 3], [0.5, 2], [0, 0], None, "22")
    },
    **{
        f"dtype {value!r}": edit_tensor(lambda entry, value=value: entry.update(dtype=value))
        for value in ("quint8", "float64", "int8", "load", "", None, [1])
    },
    **{
        f"boxes {value!s:.20}": edit_tensor(lambda entry, value=value: entry.update(boxes=value))
        for value in ([], None, "x", [[]], [3], [None], {}, [[0] * 6] * 3)
    },
    "shape turned": edit_tensor(lambda entry: entry["shape"].reverse()),
    "short row": edit_tensor(lambda entry: entry["boxes"][0].pop()),
    "long row": edit_tensor(lambda entry: entry["boxes"][0].append(0)),
    "boxes that overlap": edit_tensor(overlap),
    "a box twice": edit_tensor(lambda entry: entry["boxes"].append(entry["boxes"][0])),
    "a box instead of another": edit_tensor(
        lambda entry: entry["boxes"].__setitem__(1, entry["boxes"][0]),
    ),
    "a box is missing": edit_tensor(lambda entry: entry["boxes"].pop()),
    "no entry": edit_manifest(lambda content: content["tensors"].update(x=None)),
    "an empty entry": edit_manifest(lambda content: content["tensors"].update(x={})),
    "an unlisted file": edit_manifest(lambda content: content["files"].pop("__1_0.distcp") and None),
    "a parameter is missing": edit_manifest(rename),
    "a buffer is missing": edit_manifest(lambda content: content["buffers"].append("another")),
    "no tensors": edit_manifest(lambda content: content["tensors"].clear()),
}


def some_parameter(content: Any) -> Any:
    return next(iter(content["parameters"].values()))


MANIFESTS: dict[str, Callable[[Path], None]] = {
    "list": edit_manifest(lambda content: [1]),
    "text": lambda directory: (directory / MANIFEST).write_text('"x"') and None,
    "deep": lambda directory: (directory / MANIFEST).write_text("[" * 100_000) and None,
    "no json": lambda directory: (directory / MANIFEST).write_bytes(b"\x80\x02") and None,
    **{
        f"without {key}": edit_manifest(lambda content, key=key: content.pop(key) and None)
        for key in ("format", "files", "parameters", "global_step", "optimizer", "tensors")
    },
    **{
        f"{key} {value!r}": edit_manifest(lambda content, key=key, value=value: content.update({key: value}))
        for key in ("files", "parameters", "buffers", "loss_scale", "rounding", "data", "seed", "tensors")
        for value in (-0.5, "x", [[1]], {"x": 1})
    },
    "newer": edit_manifest(lambda content: content.update(format=99)),
    "older": edit_manifest(lambda content: content.update(format=1)),
    "another format": edit_manifest(lambda content: content.update(format=[2])),
    "negative size": edit_manifest(lambda content: content["files"][VALUES].update(num_bytes=-1)),
    "shape": edit_manifest(lambda content: some_parameter(content).update(shape=["1"])),
    "negative shape": edit_manifest(lambda content: some_parameter(content).update(shape=[-1])),
    "aliases": edit_manifest(lambda content: some_parameter(content).update(aliases=[[]])),
    "directory": edit_manifest(lambda content: content["files"].update({"..": content["files"][VALUES]})),
    "no values": edit_manifest(lambda content: content["files"].pop(VALUES) and None),
    "no tensors of values": edit_manifest(lambda content: content["files"].pop(TENSORS) and None),
}


# --------------------------------------------------------------------------------------------- values


def replace_values(made: bytes | str) -> Callable[[Path], None]:
    """Another content of the JSON file."""

    def craft(directory: Path) -> None:
        (directory / VALUES).write_bytes(made if isinstance(made, bytes) else made.encode())
        refit(directory)

    return craft


def insert(made: Any) -> Callable[[Path], None]:
    """Any JSON in the place of a value of the user's."""

    def craft(directory: Path) -> None:
        content = json.loads((directory / VALUES).read_bytes())
        content["client_state"]["x"] = made
        (directory / VALUES).write_text(json.dumps(content))
        refit(directory)

    return craft


def edit_header(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Another header of the file of tensors."""

    def craft(directory: Path) -> None:
        data = (directory / TENSORS).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        made = json.dumps(change(header) or header).encode()
        (directory / TENSORS).write_bytes(struct.pack("<Q", len(made)) + made + data[end:])
        refit(directory)

    return craft


def set_header(size: int) -> Callable[[Path], None]:
    """Another length of the header."""

    def craft(directory: Path) -> None:
        data = (directory / TENSORS).read_bytes()
        (directory / TENSORS).write_bytes(struct.pack("<Q", size) + data[8:])
        refit(directory)

    return craft


def all_in_one_place(header: Any) -> None:
    """More tensors than the file has bytes for, each of them the same bytes."""
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    entry = max(entries, key=lambda entry: entry["data_offsets"][1] - entry["data_offsets"][0])
    header.update({f"x{number}": entry for number in range(100_000)})


def first_entry(header: Any) -> Any:
    return header["0"]


CONTENTS: dict[str, Callable[[Path], None]] = {
    **{
        f"content {made[:10]!r}": replace_values(made)
        for made in ("[1]", "{}", "", "3", "x", '"x"', "[" * 100_000, '{"a":' * 100_000, b"\x80\x02]q\x00.")
    },
    "groups": edit_values(lambda values: values.update(groups=[{"lr": 1}])),
    "scalars": edit_values(lambda values: values.update(scalars={"blocks.0": 1})),
    "generators": edit_values(lambda values: values.update(rng=[{"python": (3, (1, 2), None)}] * 2)),
    "no client state": edit_values(lambda values: values.pop("client_state")),
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

HEADERS: dict[str, Callable[[Path], None]] = {
    **{f"length {size}": set_header(size) for size in (0, 3, 1 << 20, 1 << 63)},
    "list": edit_header(lambda header: [1]),
    "empty": edit_header(lambda header: header.clear()),
    "missing": edit_header(lambda header: header.pop("0") and None),
    "overlap": edit_header(all_in_one_place),
    **{
        f"{key} {value!r}": edit_header(
            lambda header, key=key, value=value: first_entry(header).update({key: value})
        )
        for key, values in {
            "data_offsets": ([0, 1 << 40], [-4, 0], [0.5, 4.5], [4, 0], None, "x", [1]),
            "shape": ([1 << 62], [-1], [1 << 40, 1 << 40], "x", None),
            "dtype": ("X", None, 3, "F64"),
        }.items()
        for value in values
    },
}


KINDS = {"places": PLACES, MANIFEST: MANIFESTS, VALUES: CONTENTS, TENSORS: HEADERS}


@pytest.mark.long_where(kind=["values.json", "values.safetensors", "places"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, timeout=300)
def test_crafted_file_is_one_error_that_names_it_before_anything_changes(tmp_path, kind):
    """Load each of the crafted checkpoints; what was not as expected."""
    run, good, found = Run(), Path(str(tmp_path)) / "good", []
    run.train()
    run.engine.save_checkpoint(good, "tag")
    run.train()
    for name, craft in KINDS[kind].items():
        bad = damaged(good, craft, "tag.0")
        begun = time.monotonic()
        text = message_of(lambda bad=bad: run.engine.load_checkpoint(bad))
        found += [] if f"{bad / 'tag.0'}/" in text else [f"{name}: {text}"]
        found += [f"{name}: {len(text)} characters"] * (len(text) > 600)
        found += [f"{name}: took long"] * (time.monotonic() - begun > 20)
        if text == "nothing was raised":
            return found
        run.check()
    run.engine.load_checkpoint(good)
    assert run.engine.global_step == 1
    run.engine.save_checkpoint(good, "tag")
    run.engine.load_checkpoint(good)
    return found


@needs_linux
@pytest.mark.parametrize("craft", [edit_header(all_in_one_place), insert({"$tensor": {"name": "0"}})])
def test_values_take_no_more_memory_than_their_files(tmp_path, craft):
    """Tensors that share one megabyte of the file; in sum they would be 100 GB."""
    values = {"client_state": {"big": torch.zeros(1 << 20, dtype=torch.uint8)}}
    for name, data in to_files(values).items():
        (tmp_path / name).write_bytes(data)
    content = {"files": {VALUES: {}, TENSORS: {}}}
    (tmp_path / MANIFEST).write_text(json.dumps({"content": content}))
    craft(tmp_path)

    def read() -> None:
        with pytest.raises(RuntimeError, match=str(tmp_path / VALUES)):
            read_values(tmp_path)

    assert growth(read) < 1 << 28


def tiles(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    return tile(StoredTensor(torch.uint8, shape, [StoredBox(box, 0, 0).row for box in boxes]))


def test_boxes_tile_a_tensor_when_they_hold_each_element_once():
    halves = [Box((0, 0), (2, 3)), Box((2, 0), (1, 3))]
    assert tiles(halves, (3, 3))
    assert tiles(halves[::-1], (3, 3))
    assert tiles([*halves, Box((1, 1), (0, 2))], (3, 3))
    assert tiles([], (0, 3))
    assert tiles([Box((0, 0), (0, 3))], (0, 3))
    assert tiles([Box((), ())], ())
    assert not tiles([], ())
    assert not tiles([Box((), ()), Box((), ())], ())
    assert not tiles(halves[:1], (3, 3))
    assert not tiles([Box((0, 0), (2, 3)), Box((1, 0), (1, 3))], (3, 3))  # as many, but one row twice
    assert not tiles([Box((0, 0), (3, 2)), Box((2, 1), (1, 1)), Box((0, 2), (2, 1))], (3, 3))
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1))]
    assert tiles([*pinwheel, Box((1, 1), (1, 1))], (3, 3))  # no cut goes through
    assert not tiles(pinwheel, (3, 3))


def test_boxes_of_columns_that_many_rows_cross_are_told_apart_soon():
    """To compare each of 10,000 columns with each of 10,000 rows would take 100 million steps."""
    num = 10_000
    columns = [Box((0, at), (num, 1)) for at in range(num)]
    rows = [Box((at, num), (1, 1)) for at in range(num)]
    begun = time.monotonic()
    assert tiles(columns + rows, (num, num + 1))
    assert not tiles([*columns, *rows[1:], rows[1]], (num, num + 1))
    assert time.monotonic() - begun < 10


def test_boxes_with_too_many_corners_are_refused():
    with pytest.raises(ValueError, match="too many corners"):
        tiles([Box((0,) * 40, (1,) * 40)], (1,) * 40)


def refit_damaged(directory: Path) -> None:
    """Let the checksum of a manifest fit, if it is JSON still."""
    try:
        outer = json.loads((directory / MANIFEST).read_bytes())
        content = outer["content"]
        outer["crc32"] = zlib.crc32(json.dumps(content, sort_keys=True).encode())
        (directory / MANIFEST).write_text(json.dumps(outer))
    except (ValueError, KeyError, TypeError):
        pass


def load_flipped(folder: str, file: str, seeds: range) -> list[str]:
    """Flip bytes and refit the checksums: the checkpoint is refused, or loads with what it then says."""
    run, good, found = Run(), Path(folder) / "good", []
    run.train()
    run.engine.save_checkpoint(good, "tag")
    data = (good / "tag.0" / file).read_bytes()
    for seed in seeds:
        pick, flipped = random.Random(seed), bytearray(data)
        for _ in range(pick.choice((1, 1, 2, 8))):
            flipped[pick.randrange(len(data))] = pick.randrange(256)
        (good / "tag.0" / file).write_bytes(flipped)
        if file == MANIFEST:
            refit_damaged(good / "tag.0")
        else:
            refit(good / "tag.0")
        try:
            run.engine.load_checkpoint(good)
        except (RuntimeError, ValueError) as error:
            found += [] if str(good) in str(error) else [f"{seed}: {error}"]
        except BaseException as error:
            found.append(f"{seed}: {type(error).__name__}: {error}")
    return found


@pytest.mark.long_where(file=[VALUES, TENSORS])
@pytest.mark.parametrize("file", [MANIFEST, VALUES, TENSORS])
def test_random_bytes_in_a_file_never_end_in_another_kind_of_error(ranks, tmp_path, file):
    (found,) = ranks(1, load_flipped, str(tmp_path), file, range(80), timeout=120)
    assert not found
