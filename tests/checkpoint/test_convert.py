"""Checkpoints of format 1, which had pickles: `zeroshard convert` rewrites them; crafted ones do no harm."""

from __future__ import annotations

import collections
import io
import os
import pickle
import random
import shutil
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim.lr_scheduler import MultiStepLR

import zeroshard
from tests.checkpoint.runs import read_whole
from tests.checkpoint.test_crafted import peak_of, refit
from tests.checkpoint.test_values import check_same
from zeroshard.checkpoint.files import MANIFEST, TENSORS, VALUES, find
from zeroshard.checkpoint.reader import open_checkpoint
from zeroshard.checkpoint.values import read_values
from zeroshard.cli.convert import convert
from zeroshard.cli.main import main

INDEX, OLD_VALUES, PART = ".metadata", "values.pt", "__0_0.distcp"
Edit = Callable[[Any], Any]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder with a checkpoint of format 1, which zeroshard 0.1.0 wrote with torch 2.14 on 2 ranks."""
    with zipfile.ZipFile(Path(__file__).with_name("format1.zip")) as archive:
        archive.extractall(tmp_path / "old")
    return tmp_path / "old"


# ------------------------------------------------------------------------------------- what is rewritten


class Tied(nn.Module):
    """The model of that checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.mix = nn.Parameter(torch.randn(3, 5, 200))
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.head(torch.einsum("bd,kde->be", self.tokens(x)[:, :5], self.mix)[:, :6]) * self.gain


CLIENT_STATE = {
    "numbers": [1, -(2**80), 0.1, float("inf"), True, None, 1j],
    "text": ("naïve ✓", b"bytes"),
    7: {(1, 2): {3}},
    "tensors": [torch.arange(3), torch.tensor(2.5, dtype=torch.bfloat16), torch.ones(2, dtype=torch.uint16)],
    "ordered": collections.OrderedDict(a=1),
    "counted": collections.Counter("aab"),
    "kinds": [torch.float16, torch.device("cpu"), torch.Size((1, 2))],
    "parameter": nn.Parameter(torch.ones(2)),
    "views": [torch.arange(12.0).view(3, 4).t(), torch.zeros(1).expand(9), torch.eye(3).to_sparse()],
}
"""What was given to save_checkpoint()."""


def load(folder: Path) -> Any:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    engine, optimizer, loader, _ = zeroshard.initialize(
        model,
        optimizer,
        {"stage": 3, "micro_batch_size": 3},
        training_data=torch.utils.data.TensorDataset(torch.arange(24) % 11),
        lr_scheduler=MultiStepLR(optimizer, [4, 5]),
    )
    check_same(engine.load_checkpoint(folder), CLIENT_STATE)
    [group] = optimizer.param_groups
    scheduler = engine.lr_scheduler
    learning = group["lr"], group["initial_lr"], scheduler.last_epoch, dict(scheduler.milestones)
    progress = engine.global_step, sum(1 for _ in loader), learning
    steps = {float(state["step"]) for state in optimizer.state.values()}
    return progress, steps, engine.full_state_dict()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_converted_checkpoint_has_what_torch_reads_of_the_old_one(ranks, tmp_path, old, num_ranks):
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    directory = convert(find(old), tmp_path / "new")
    assert directory == find(tmp_path / "new") == tmp_path / "new" / "old.0"
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
    assert {path.name for path in directory.iterdir()} == {
        *(INDEX, VALUES, TENSORS, MANIFEST, PART, "__1_0.distcp")
    }
    for number, folder in enumerate((old / "old.0", directory)):
        dcp_to_torch_save(folder, tmp_path / f"{number}.pt")
    want, same = (torch.load(tmp_path / f"{number}.pt", weights_only=True) for number in (0, 1))
    got = read_whole(open_checkpoint(directory))
    assert got.keys() == want.keys() - {"head.weight"}
    for read in (want, same):
        assert all(torch.equal(value, read[name]) for name, value in got.items())
    for progress, steps, model in ranks(num_ranks, load, tmp_path / "new"):
        left = 4 - 3 if num_ranks == 2 else 8 - 6  # batches of the epoch
        assert progress == (3, left, (0.01 * 0.1, 0.01, 3, {2: 1, 5: 1}))
        assert steps == {3.0}
        assert all(torch.equal(value, want[name]) for name, value in model.items())


def test_an_old_checkpoint_is_refused_with_the_command_that_rewrites_it(old, tmp_path, capsys):
    command = f"rewrite it with `zeroshard convert {old / 'old.0'} FOLDER`"
    for arguments in (["inspect", str(old)], ["export", str(old), str(tmp_path / "out")]):
        assert main(arguments) == 1
        assert command in capsys.readouterr().err
    assert main(["convert", str(old), str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'new' / 'old.0'}\n"
    assert main(["inspect", str(tmp_path / "new")]) == 0
    assert main(["export", str(tmp_path / "new"), str(tmp_path / "out")]) == 0


def test_nothing_is_converted_twice_or_over_another_checkpoint(old, tmp_path, capsys):
    assert main(["convert", str(old), str(old)]) == 2
    assert f"'{old}': has a checkpoint of tag 'old': expected another folder" in capsys.readouterr().err
    assert main(["convert", str(old), str(tmp_path / "new")]) == 0
    assert main(["convert", str(tmp_path / "new"), str(tmp_path / "newer")]) == 2
    assert "expected checkpoint format 1, got 2" in capsys.readouterr().err
    assert not (tmp_path / "newer").exists()


def test_files_are_copied_where_there_are_no_links(old, tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise PermissionError("no links")

    monkeypatch.setattr(os, "link", fail)
    directory = convert(find(old), tmp_path / "new")
    assert (directory / PART).read_bytes() == (old / "old.0" / PART).read_bytes()
    assert (directory / PART).stat().st_nlink == 1
    open_checkpoint(directory)


@pytest.mark.parametrize("name", [INDEX, OLD_VALUES, PART, MANIFEST])
def test_a_damaged_old_checkpoint_is_named_and_leaves_nothing(old, tmp_path, name):
    file = old / "old.0" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(RuntimeError, match=name):
        convert(find(old), tmp_path / "new")
    assert not (tmp_path / "new").exists()


# ------------------------------------------------------------------------------------------------ calls


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
        outside.write_bytes((directory / PART).read_bytes())
        index = read_index(directory)
        for info in index.storage_data.values():
            info.relative_path = path if info.relative_path == PART else info.relative_path
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
    "deep tuple": lambda directory: write_index(directory, deep(200_000)),
    "deep tuple as a key": lambda directory: write_index(
        directory, b"\x80\x02}" + deep(200_000)[2:-1] + b"Ns."
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


# ----------------------------------------------------------------------------------------------- values


def replace_values(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Other contents of the values: made from the directory; by torch.save, or as bytes."""

    def craft(directory: Path) -> None:
        made = make(directory)
        if isinstance(made, bytes):
            (directory / OLD_VALUES).write_bytes(made)
        else:
            torch.save(made, directory / OLD_VALUES)
        refit(directory)

    return craft


def edit_values(change: Edit) -> Callable[[Path], None]:
    def make(directory: Path) -> Any:
        values = torch.load(directory / OLD_VALUES, weights_only=True)
        change(values)
        return values

    return replace_values(make)


def rewrite(change: Callable[[str, bytes], tuple[bytes, int]]) -> Callable[[Path], None]:
    """Another archive: of each record, by its name and bytes, the new bytes and how they are stored."""

    def craft(directory: Path) -> None:
        made = io.BytesIO()
        with zipfile.ZipFile(directory / OLD_VALUES) as source, zipfile.ZipFile(made, "w") as target:
            for record in source.infolist():
                data, method = change(record.filename, source.read(record))
                target.writestr(record.filename, data, method)
        (directory / OLD_VALUES).write_bytes(made.getvalue())
        refit(directory)

    return craft


def with_pickle(code: bytes) -> Callable[[Path], None]:
    """Another pickle in the archive."""
    return rewrite(lambda name, data: (code if name.endswith("/data.pkl") else data, zipfile.ZIP_STORED))


def longer_than_the_file(directory: Path) -> None:
    """The directory of the archive says of a record that it goes on and on."""
    data = bytearray((directory / OLD_VALUES).read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 20 : at + 28] = struct.pack("<II", 1 << 31, 1 << 31)
    (directory / OLD_VALUES).write_bytes(data)
    refit(directory)


CONTENTS: dict[str, Callable[[Path], None]] = {
    "list": replace_values(lambda _: [1]),
    "plain pickle": replace_values(lambda directory: pickle.dumps(calls(directory)[0])),
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
    "deep tuple": with_pickle(deep(200_000)),
    "deep tuple as a key": with_pickle(b"\x80\x02}" + deep(200_000)[2:-1] + b"Ns."),
    "a list that holds itself": with_pickle(b"\x80\x02]q\x00h\x00a."),
    **{
        f"call {number}": lambda directory, number=number: edit_values(
            lambda values: values["client_state"].update(x=calls(directory)[number])
        )(directory)
        for number in range(10)
    },
}


# ---------------------------------------------------------------------------------------------- tensors


def edit_record(change: Callable[[zipfile.ZipFile, zipfile.ZipInfo, bytes], None]) -> Callable[[Path], None]:
    """Write the first tensor again, its elements by `change`, and all else as torch.save has it."""

    def craft(directory: Path) -> None:
        index, data = read_index(directory), (directory / PART).read_bytes()
        info = next(info for info in index.storage_data.values() if info.relative_path == PART)
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
        (directory / PART).write_bytes(data + made.getvalue())
        write_index(directory, index)

    return craft


def beyond_the_end(directory: Path) -> None:
    """The local header says that its name is so long that elements begin behind the archive."""
    data, index = bytearray((directory / PART).read_bytes()), read_index(directory)
    info = next(info for info in index.storage_data.values() if info.relative_path == PART)
    with zipfile.ZipFile(io.BytesIO(data[info.offset : info.offset + info.length])) as archive:
        start = next(
            record.header_offset for record in archive.infolist() if record.filename[-7:] == "/data/0"
        )
    data[info.offset + start + 26 : info.offset + start + 30] = struct.pack("<HH", 65535, 65535)
    (directory / PART).write_bytes(data)
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


CRAFTED = {
    f"{kind}: {name}": craft
    for kind, crafts in {"index": INDICES, "values": CONTENTS, "tensors": RECORDS}.items()
    for name, craft in crafts.items()
}


@pytest.mark.long_where(name=[name for name in CRAFTED if "deep tuple" in name])
@pytest.mark.long_where(name=[name for number, name in enumerate(CRAFTED) if number % 4])
@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_pickle_runs_no_code_and_is_one_error_that_names_it(old, tmp_path, name):
    CRAFTED[name](old / "old.0")
    begun = time.monotonic()

    def refused() -> None:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            convert(find(old), tmp_path / "new")
        assert f"{old / 'old.0'}/" in str(caught.value)
        assert len(str(caught.value)) < 600

    assert peak_of(refused) < 1 << 29
    assert time.monotonic() - begun < 20
    assert not marker(old / "old.0").exists()
    assert not any((tmp_path / "new").glob("*"))


@pytest.mark.long
@pytest.mark.parametrize("file", [INDEX, OLD_VALUES])
def test_random_bytes_in_a_pickle_never_end_in_another_kind_of_error(old, tmp_path, file):
    data, found = (old / "old.0" / file).read_bytes(), collections.Counter()
    for seed in range(150):
        pick, flipped = random.Random(seed), bytearray(data)
        for _ in range(pick.choice((1, 1, 2, 8))):
            flipped[pick.randrange(len(data))] = pick.randrange(256)
        (old / "old.0" / file).write_bytes(flipped)
        refit(old / "old.0")
        try:
            read_values(convert(find(old), tmp_path / "new"))
            shutil.rmtree(tmp_path / "new")
        except RuntimeError as error:
            found[str(old) in str(error)] += 1
    assert found[True] > 10
    assert not found[False]
