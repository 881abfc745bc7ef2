"""Checkpoints made to do harm, their checksums fitting: no code runs, and one error names the file."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from tests.checkpoint.test_faults import Run, damaged, message_of
from zeroshard.checkpoint import plain
from zeroshard.checkpoint.boxes import Box, tiles
from zeroshard.checkpoint.files import MANIFEST
from zeroshard.checkpoint.reader import INDEX
from zeroshard.checkpoint.save import VALUES

TENSORS = "__0_0.distcp"
Edit = Callable[[Any], Any]


def refit(directory: Path, edit: Edit = lambda content: content) -> None:
    """Write the manifest again: sizes and checksums of the files as they are now, changed by `edit`."""
    content = json.loads((directory / MANIFEST).read_bytes())["content"]
    for name in content["files"]:
        data = (directory / name).read_bytes()
        content["files"][name] = {"num_bytes": len(data), "crc32": zlib.crc32(data)}
    content = edit(content) or content
    outer = {"crc32": zlib.crc32(json.dumps(content, sort_keys=True).encode()), "content": content}
    (directory / MANIFEST).write_text(json.dumps(outer))


class Calls:
    """Pickled, it is a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


def marker(directory: Path) -> Path:
    """What none of the code here may make."""
    return directory.parent / "marker"


def calls(directory: Path) -> list[Calls]:
    """Calls that make the marker, or that a careless unpickler would let pass."""
    file = str(marker(directory))
    return [
        Calls(os.system, f"touch {file}"),
        Calls(eval, f"open({file!r}, 'w')"),
        Calls(exec, f"open({file!r}, 'w')"),
        Calls(torch.save, 1, file),
        Calls(getattr, torch.Size, "mro"),
        Calls(torch.load, file),
        Calls(torch._utils._rebuild_tensor_v2, None, 0, (1 << 40,), (1,), False, {}),
        Calls(torch.zeros, 1 << 40),
        Calls(shutil.copy, "/etc/hostname", file),
        Calls(torch.hub.load, "owner/repository", "model"),
    ]


# ------------------------------------------------------------------------------------- crafted indices


def read_index(directory: Path) -> dcp.Metadata:
    index: dcp.Metadata = pickle.loads((directory / INDEX).read_bytes())
    return index


def write_index(directory: Path, index: Any, edit: Edit = lambda content: content) -> None:
    (directory / INDEX).write_bytes(index if isinstance(index, bytes) else pickle.dumps(index))
    refit(directory, edit)


def first(index: dcp.Metadata) -> Any:
    """The entry of the first tensor that has more than one part."""
    return next(entry for entry in index.state_dict_metadata.values() if len(entry.chunks) > 1)


def place(index: dcp.Metadata) -> Any:
    """Where some part is."""
    return next(iter(index.storage_data.values()))


def edit_index(change: Edit) -> Callable[[Path], None]:
    def craft(directory: Path) -> None:
        index = read_index(directory)
        change(index)
        write_index(directory, index)

    return craft


def move(index: dcp.Metadata, row: int) -> None:
    """Let the second part of a tensor begin in another row; its place is known there too."""
    chunk, places = first(index).chunks[1], index.storage_data
    old, chunk.offsets = tuple(chunk.offsets), torch.Size((row, *chunk.offsets[1:]))
    for key in [key for key in places if tuple(key.offset) == old]:
        places[dcp.MetadataIndex(key.fqn, chunk.offsets)] = places[key]


def cut(index: dcp.Metadata) -> None:
    """Let the second part of a tensor be empty."""
    chunk = first(index).chunks[1]
    chunk.sizes = torch.Size((0, *chunk.sizes[1:]))


def point_outside(path: str) -> Callable[[Path], None]:
    """A file elsewhere, which the manifest lists as well."""

    def craft(directory: Path) -> None:
        outside = directory / path
        outside.write_bytes((directory / TENSORS).read_bytes())
        index = read_index(directory)
        for info in index.storage_data.values():
            info.relative_path = path if info.relative_path == TENSORS else info.relative_path
        record = {"num_bytes": outside.stat().st_size, "crc32": zlib.crc32(outside.read_bytes())}

        def list_it(content: Any) -> None:
            content["files"][path] = record

        write_index(directory, index, list_it)

    return craft


HUGE = (1 << 45).to_bytes(8, "little")
"""More bytes than there are."""


def pollute(directory: Path) -> None:
    """BUILD with a class in the place of an object: sets attributes of the class for the whole process."""
    target = pickle.dumps(dcp.MetadataIndex, protocol=4).removesuffix(b".")[11:]  # without its frame
    write_index(directory, b"\x80\x04" + target + b"N}X\x03\x00\x00\x00fqnK\x01s\x86b.")


def repeat_a_part(index: dcp.Metadata) -> None:
    chunks = first(index).chunks
    chunks[:] = [chunks[0]] * len(chunks)


def rename_a_parameter(index: dcp.Metadata) -> None:
    name = next(name for name in index.state_dict_metadata if not name.startswith("optimizer/"))
    index.state_dict_metadata["another"] = index.state_dict_metadata.pop(name)


def bomb(leaf: Any = (), depth: int = 60, pair: Callable[[Any, Any], Any] = lambda *both: both) -> Any:
    """A pair of twice the same pair, and so on: small, but it takes 2**depth steps to walk through it."""
    for _ in range(depth):
        leaf = pair(leaf, leaf)
    return leaf


def deep(num: int) -> bytes:
    """The pickle of a tuple in a tuple in a tuple, ...: Python itself cannot write it."""
    return b"\x80\x02)" + num * pickle.TUPLE1 + b"."


def place_of(fqn: Any, offset: Any) -> dcp.MetadataIndex:
    """A key of the index whose attributes are of any kind."""
    made = object.__new__(dcp.MetadataIndex)
    vars(made).update(fqn=fqn, offset=offset)
    return made


def as_key(make: Callable[[], Any]) -> Callable[[Path], None]:
    """What is hashed when the index is read. A dict here would hash it too, so the dict is put together."""

    def craft(directory: Path) -> None:
        key = pickle.dumps(make(), protocol=4)[11:-1]  # without its frame
        write_index(directory, b"\x80\x04}" + key + b"Ns.")

    return craft


INDICES: dict[str, Callable[[Path], None]] = {
    "another file that is listed": point_outside("../outside"),
    "another file by its whole path": lambda directory: point_outside(f"{directory.parent}/outside")(
        directory
    ),
    "a path that is not listed": edit_index(lambda index: setattr(place(index), "relative_path", "../x")),
    "no path": edit_index(lambda index: setattr(place(index), "relative_path", ["x"])),
    "negative offset": edit_index(lambda index: setattr(place(index), "offset", -1)),
    "huge offset": edit_index(lambda index: setattr(place(index), "offset", 1 << 70)),
    "huge length": edit_index(lambda index: setattr(place(index), "length", 1 << 62)),
    "fractional offset": edit_index(lambda index: setattr(place(index), "offset", 0.5)),
    "transformed": edit_index(lambda index: setattr(place(index), "transform_descriptors", ["zstd"])),
    "huge shape": edit_index(lambda index: setattr(first(index), "size", torch.Size((1 << 62, 1 << 62)))),
    "fewer dimensions": edit_index(lambda index: setattr(first(index), "size", torch.Size((1,)))),
    "another shape": edit_index(lambda index: setattr(first(index), "size", first(index).size[::-1])),
    "no shape": edit_index(lambda index: setattr(first(index), "size", None)),
    "part outside": edit_index(lambda index: move(index, 1 << 40)),
    "part before the start": edit_index(lambda index: move(index, -1)),
    "parts that overlap": edit_index(lambda index: move(index, first(index).chunks[1].offsets[0] - 1)),
    "part without elements": edit_index(cut),
    "the same part again": edit_index(repeat_a_part),
    "a part is missing": edit_index(lambda index: first(index).chunks.pop()),
    "its place is missing": edit_index(lambda index: index.storage_data.clear()),
    "no places": edit_index(lambda index: setattr(index, "storage_data", None)),
    "dtype of codes": edit_index(lambda index: setattr(first(index).properties, "dtype", torch.quint8)),
    "bytes": edit_index(lambda index: index.state_dict_metadata.update(x=dcp.BytesStorageMetadata())),
    "bytes by a name that is there": edit_index(
        lambda index: index.state_dict_metadata.update(
            dict.fromkeys(index.state_dict_metadata, dcp.BytesStorageMetadata())
        )
    ),
    "a parameter is missing": edit_index(rename_a_parameter),
    "a list": lambda directory: write_index(directory, [1, 2, 3]),
    "a class": lambda directory: write_index(directory, dcp.Metadata),
    "prefix": lambda directory: write_index(directory, filesystem._StoragePrefix("x")),
    "nothing": lambda directory: write_index(directory, b""),
    "attributes of a class": pollute,
    "tuple of tuples as a key": as_key(bomb),
    "deep tuple": lambda directory: write_index(directory, deep(1_000_000)),
    "deep tuple as a key": lambda directory: write_index(
        directory, b"\x80\x02}" + deep(1_000_000)[2:-1] + b"Ns."
    ),
    "wide tuple as a key": as_key(lambda: (tuple(range(3000)),) * 3000),
    "places of places as a key": as_key(lambda: bomb("x", 60, place_of)),
    "tuple of tuples as a shape": edit_index(lambda index: setattr(first(index), "size", bomb())),
    **{
        f"memory {opcode!r}": lambda directory, opcode=opcode, size=size: write_index(
            directory, b"\x80\x05]" + opcode + size + b"."
        )
        for opcode, size in (
            (pickle.LONG_BINPUT, b"\xff\xff\xff\xff"),
            (pickle.LONG4, b"\xff\xff\xff\x7f"),
            *(
                (code, HUGE)
                for code in (pickle.BYTEARRAY8, pickle.BINBYTES8, pickle.BINUNICODE8, pickle.FRAME)
            ),
        )
    },
    **{
        f"call {number}": lambda directory, number=number: write_index(directory, calls(directory)[number])
        for number in range(10)
    },
    **{
        f"call {number} inside": lambda directory, number=number: edit_index(
            lambda index: setattr(index, "planner_data", calls(directory)[number])
        )(directory)
        for number in range(10)
    },
}


# --------------------------------------------------------------------------- crafted values and manifests


def replace_values(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Other contents of the values: made from the directory; by torch.save, or as bytes."""

    def craft(directory: Path) -> None:
        made = make(directory)
        if isinstance(made, bytes):
            (directory / VALUES).write_bytes(made)
        else:
            torch.save(made, directory / VALUES)
        refit(directory)

    return craft


def edit_values(change: Edit) -> Callable[[Path], None]:
    def make(directory: Path) -> Any:
        values = torch.load(directory / VALUES, weights_only=True)
        change(values)
        return values

    return replace_values(make)


def rewrite(change: Callable[[str, bytes], tuple[bytes, int]]) -> Callable[[Path], None]:
    """Another archive: of each record, by its name and bytes, the new bytes and how they are stored."""

    def craft(directory: Path) -> None:
        made = io.BytesIO()
        with zipfile.ZipFile(directory / VALUES) as source, zipfile.ZipFile(made, "w") as target:
            for record in source.infolist():
                data, method = change(record.filename, source.read(record))
                target.writestr(record.filename, data, method)
        (directory / VALUES).write_bytes(made.getvalue())
        refit(directory)

    return craft


def with_pickle(code: bytes) -> Callable[[Path], None]:
    """Another pickle in the archive."""
    return rewrite(lambda name, data: (code if name.endswith("/data.pkl") else data, zipfile.ZIP_STORED))


def longer_than_the_file(directory: Path) -> None:
    """The directory of the archive says of a record that it goes on and on."""
    data = bytearray((directory / VALUES).read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 20 : at + 28] = struct.pack("<II", 1 << 31, 1 << 31)
    (directory / VALUES).write_bytes(data)
    refit(directory)


CONTENTS: dict[str, Callable[[Path], None]] = {
    "list": replace_values(lambda _: [1]),
    "empty": replace_values(lambda _: {}),
    "plain pickle": replace_values(lambda directory: pickle.dumps(calls(directory)[0])),
    "groups": edit_values(lambda values: values.update(groups=[{"lr": 1}])),
    "scalars": edit_values(lambda values: values.update(scalars={"blocks.0": 1})),
    "generators": edit_values(lambda values: values.update(rng=[{"python": (3, (1, 2), None)}] * 2)),
    "compressed": rewrite(lambda name, data: (data, zipfile.ZIP_DEFLATED)),
    "longer than the file": longer_than_the_file,
    **{
        f"memory {kind}": with_pickle(b"\x80\x02c" + kind + b"\n\x8a\x06" + HUGE[:6] + b"\x85R.")
        for kind in (
            *(b"builtins\nbytearray", b"__builtin__\nbytearray", b"torch\nTensor", b"torch\nFloatTensor"),
            b"torch.sparse\nFloatTensor",
        )
    },
    "tuple of tuples": edit_values(lambda values: values["client_state"].update(x=bomb())),
    "tuple of tuples as a key": with_pickle(
        b"\x80\x02})" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(60)) + b"Ns."
    ),
    "list of lists": edit_values(
        lambda values: values["client_state"].update(x=bomb([], 60, lambda *both: list(both)))
    ),
    "tuple of tuples as a hyperparameter": edit_values(lambda values: values["groups"][0].update(x=bomb())),
    "deep tuple": with_pickle(deep(1_000_000)),
    "deep tuple as a key": with_pickle(b"\x80\x02}" + deep(1_000_000)[2:-1] + b"Ns."),
    "a list that holds itself": with_pickle(b"\x80\x02]q\x00h\x00a."),
    "no client state": edit_values(lambda values: values.pop("client_state")),
    **{
        f"call {number}": lambda directory, number=number: edit_values(
            lambda values: values["client_state"].update(x=calls(directory)[number])
        )(directory)
        for number in range(10)
    },
}


def edit_manifest(change: Edit) -> Callable[[Path], None]:
    return lambda directory: refit(directory, change)


def some_parameter(content: Any) -> Any:
    return next(iter(content["parameters"].values()))


MANIFESTS: dict[str, Callable[[Path], None]] = {
    "list": edit_manifest(lambda content: [1]),
    "text": lambda directory: (directory / MANIFEST).write_text('"x"') and None,
    "deep": lambda directory: (directory / MANIFEST).write_text("[" * 100_000) and None,
    "no json": lambda directory: (directory / MANIFEST).write_bytes(b"\x80\x02") and None,
    **{
        f"without {key}": edit_manifest(lambda content, key=key: content.pop(key) and None)
        for key in ("format", "files", "parameters", "global_step", "buffers", "config", "optimizer")
    },
    **{
        f"{key} {value!r}": edit_manifest(lambda content, key=key, value=value: content.update({key: value}))
        for key in ("files", "parameters", "global_step", "buffers", "loss_scale", "rounding", "data", "seed")
        for value in (-0.5, "x", [[1]], {"x": 1})
    },
    "newer": edit_manifest(lambda content: content.update(format=99)),
    "shape": edit_manifest(lambda content: some_parameter(content).update(shape=["1"])),
    "negative shape": edit_manifest(lambda content: some_parameter(content).update(shape=[-1])),
    "aliases": edit_manifest(lambda content: some_parameter(content).update(aliases=[[]])),
    "directory": edit_manifest(lambda content: content["files"].update({"..": content["files"][VALUES]})),
    "no values": edit_manifest(lambda content: content["files"].pop(VALUES) and None),
    "no index": edit_manifest(lambda content: content["files"].pop(INDEX) and None),
}


# ------------------------------------------------------------------------------------- crafted tensors


def edit_record(change: Callable[[zipfile.ZipFile, zipfile.ZipInfo, bytes], None]) -> Callable[[Path], None]:
    """Write the first tensor again, its elements by `change`, and all else as torch.save has it."""

    def craft(directory: Path) -> None:
        index, data = read_index(directory), (directory / TENSORS).read_bytes()
        info = next(info for info in index.storage_data.values() if info.relative_path == TENSORS)
        made = io.BytesIO()
        with (
            zipfile.ZipFile(io.BytesIO(data[info.offset : info.offset + info.length])) as source,
            zipfile.ZipFile(made, "w") as target,
        ):
            for record in source.infolist():
                if record.filename.endswith("/data/0"):
                    change(target, record, source.read(record))
                else:
                    target.writestr(record.filename, source.read(record))
        info.offset, info.length = len(data), len(made.getvalue())
        (directory / TENSORS).write_bytes(data + made.getvalue())
        write_index(directory, index)

    return craft


def beyond_the_end(directory: Path) -> None:
    """The local header says that its name is so long that elements begin behind the archive."""
    data, index = bytearray((directory / TENSORS).read_bytes()), read_index(directory)
    info = next(info for info in index.storage_data.values() if info.relative_path == TENSORS)
    with zipfile.ZipFile(io.BytesIO(data[info.offset : info.offset + info.length])) as archive:
        start = next(
            record.header_offset for record in archive.infolist() if record.filename[-7:] == "/data/0"
        )
    data[info.offset + start + 26 : info.offset + start + 30] = struct.pack("<HH", 65535, 65535)
    (directory / TENSORS).write_bytes(data)
    refit(directory)


RECORDS: dict[str, Callable[[Path], None]] = {
    "compressed": edit_record(
        lambda zip, record, data: zip.writestr(record.filename, data, zipfile.ZIP_DEFLATED)
    ),
    "longer": edit_record(lambda zip, record, data: zip.writestr(record.filename, data + bytes(4))),
    "shorter": edit_record(lambda zip, record, data: zip.writestr(record.filename, data[:-4])),
    "missing": edit_record(lambda zip, record, data: None),
    "twice": edit_record(
        lambda zip, record, data: [zip.writestr(f"{n}/data/0", data) for n in "ab"] and None
    ),
    "beyond the end": beyond_the_end,
    "no archive": edit_index(
        lambda index: [setattr(info, "offset", 1) for info in index.storage_data.values()]
    ),
}


KINDS = {INDEX: INDICES, VALUES: CONTENTS, MANIFEST: MANIFESTS, TENSORS: RECORDS}


def load_crafted(folder: str, file: str) -> list[str]:
    """Load each of the crafted checkpoints; what was not as expected."""
    run, good, found = Run(), Path(folder) / "good", []
    run.train()
    run.engine.save_checkpoint(good, "tag")
    run.train()
    for name, craft in KINDS[file].items():
        bad = damaged(good, craft, "tag.0")
        text = message_of(lambda bad=bad: run.engine.load_checkpoint(bad))
        found += [] if f"{bad / 'tag.0'}/" in text else [f"{name}: {text}"]
        found += [f"{name}: code ran"] * marker(bad / "tag.0").exists()
        found += [f"{name}: {len(text)} characters"] * (len(text) > 600)
        if text == "nothing was raised":
            return found
        if file != TENSORS:  # what is read while loading can be found only then, and the error says so
            run.check()
        else:
            assert "load another checkpoint" in text, text
    run.engine.load_checkpoint(good)
    assert run.engine.global_step == 1
    if file != TENSORS:
        run.engine.save_checkpoint(good, "tag")
        run.engine.load_checkpoint(good)
    return found


@pytest.mark.parametrize("file", KINDS)
def test_crafted_file_runs_no_code_and_is_one_error_that_names_it(ranks, tmp_path, file):
    assert ranks(2, load_crafted, str(tmp_path), file, timeout=120) == [[], []]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_values_take_no_more_memory_than_their_file(tmp_path, method):
    """bytearray(n), and zeros that are deflated: both small in the file."""
    code = b"\x80\x02cbuiltins\nbytearray\nJ" + (1 << 30).to_bytes(4, "little") + b"\x85R."
    with (
        zipfile.ZipFile(io.BytesIO(plain.to_bytes({}))) as source,
        zipfile.ZipFile(tmp_path / "values", "w", method) as target,
    ):
        for record in source.infolist():
            with target.open(record.filename, "w") as stream:
                if not record.filename.endswith("/data.pkl"):
                    stream.write(source.read(record))
                elif method == zipfile.ZIP_STORED:
                    stream.write(code)
                else:
                    for _ in range(512):
                        stream.write(bytes(1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RuntimeError, match=re.escape(str(tmp_path / "values"))):
        plain.read(tmp_path / "values")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 16  # KiB


def test_boxes_tile_a_tensor_when_they_hold_each_element_once():
    halves = [Box((0, 0), (2, 3)), Box((2, 0), (1, 3))]
    assert tiles(halves, (3, 3))
    assert tiles(halves[::-1], (3, 3))
    assert tiles([], (0, 3))
    assert tiles([Box((), ())], ())
    assert not tiles([Box((), ()), Box((), ())], ())
    assert not tiles(halves[:1], (3, 3))
    assert not tiles([Box((0, 0), (2, 3)), Box((1, 0), (1, 3))], (3, 3))  # as many, but one row twice
    assert not tiles([Box((0, 0), (3, 2)), Box((2, 1), (1, 1)), Box((0, 2), (2, 1))], (3, 3))


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
        refit(good / "tag.0")
        try:
            run.engine.load_checkpoint(good)
        except (RuntimeError, ValueError) as error:
            found += [] if str(good) in str(error) else [f"{seed}: {error}"]
        except BaseException as error:
            found.append(f"{seed}: {type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("file", [INDEX, VALUES])
def test_random_bytes_in_a_file_never_end_in_another_kind_of_error(ranks, tmp_path, file):
    (found,) = ranks(1, load_flipped, str(tmp_path), file, range(80), timeout=120)
    assert not found
