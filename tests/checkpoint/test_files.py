"""Where checkpoints lie: what a crash at any point leaves, and what the next save makes of it."""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from zeroshard.checkpoint.files import (
    LATEST,
    MANIFEST,
    TENSORS,
    VALUES,
    check_tag,
    commit,
    discard,
    find,
    open_place,
)
from zeroshard.codec import DamageError

CALLS = ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir")
"""System calls of a save. A crash before one of them is a crash after the one before it."""


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


class CrashError(BaseException):
    """The process ends here: no handler runs."""


class Save:
    """One save of a content under a tag, in the steps that `zeroshard.checkpoint.save` takes."""

    def __init__(self, folder: Path, tag: str, content: str, keep_last: int | None = None) -> None:
        self.folder, self.tag, self.content, self.keep_last = folder, tag, content, keep_last

    def __call__(self) -> None:
        place = open_place(self.folder, self.tag)
        (place.temporary / "tensors").write_text(self.content)
        (place.temporary / MANIFEST).write_text(self.content)
        try:
            commit(place, self.keep_last)
        except OSError:
            discard(place)
            raise


def read(directory: Path) -> str:
    """The content of a checkpoint, which must be complete."""
    content = (directory / MANIFEST).read_text()
    assert (directory / "tensors").read_text() == content
    return content


def visible(folder: Path) -> list[str]:
    """What the checkpoints that a user sees in a folder hold; each must be complete."""
    return [read(path) for path in sorted(folder.iterdir()) if path.is_dir() and path.name[0] != "."]


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name[0] == "."]


def intercept(monkeypatch: pytest.MonkeyPatch, before: Callable[[str], None]) -> None:
    """Call `before` with the name of each system call that follows."""

    def wrap(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            before(name)
            return call(*args, **kwargs)

        return wrapped

    for name in CALLS:
        monkeypatch.setattr(os, name, wrap(name, getattr(os, name)))


def stop_before(number: int, error: BaseException) -> Callable[[str], None]:
    """Raise at the call of that number, and, as a process that has ended, at each one after it."""
    done = 0

    def before(_: str) -> None:
        nonlocal done
        done += 1
        if done >= number:
            raise error

    return before


def crashes(save: Callable[[], None], prepare: Callable[[], None]) -> Iterator[int]:
    """Prepare, and crash `save` before its first call, its second, ... until it ends."""
    for number in range(1, 100):
        prepare()
        with pytest.MonkeyPatch.context() as patch:
            intercept(patch, stop_before(number, CrashError()))
            try:
                save()
            except CrashError:
                pass
            else:
                return
        yield number


@pytest.mark.parametrize("tag", ["a", "b"], ids=["same tag", "new tag"])
@pytest.mark.parametrize("earlier", [("zero", "old"), ()], ids=["older ones", "the first"])
@pytest.mark.parametrize("keep_last", [None, 1])
def test_a_crash_at_any_point_leaves_the_last_checkpoint_or_the_one_before(tmp_path, tag, earlier, keep_last):
    folder, (*_, before) = tmp_path, ("none", *earlier)

    def prepare():
        nonlocal folder
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for content in earlier:
            Save(folder, "a", content)()

    found = []
    for _ in crashes(lambda: Save(folder, tag, "new", keep_last)(), prepare):
        try:
            found.append(read(find(folder)))
        except ValueError:
            found.append("none")
        assert not folder.exists() or set(visible(folder)) <= {"old", "new"}
        Save(folder, tag, "next", keep_last)()
        assert read(find(folder)) == read(find(folder, tag)) == "next"
        names = [path.name.rpartition(".")[0] for path in folder.iterdir() if path.is_dir()]
        assert names.count(tag) == 1
        Save(folder, "a", "of that tag", keep_last)()
        assert not hidden(folder)
    assert len(found) > 8
    assert found == sorted(found, key=[before, "new"].index)
    assert set(found) == {before, "new"}


@pytest.mark.parametrize("tag", ["a", "b"], ids=["same tag", "new tag"])
def test_an_error_at_any_point_leaves_a_checkpoint_and_nothing_of_the_new_one(tmp_path, tag):
    """As `zeroshard.checkpoint.save` has it, what follows an error in `commit` is `discard`."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for number in range(1, 7):
        folder = tmp_path / str(number)
        Save(folder, "a", "old")()
        place = open_place(folder, tag)
        (place.temporary / "tensors").write_text("new")
        (place.temporary / MANIFEST).write_text("new")
        stop = stop_before(number, full)
        with pytest.MonkeyPatch.context() as patch:
            intercept(patch, lambda name, stop=stop: stop(name) if name == "fsync" else None)
            with pytest.raises(OSError, match=re.escape(str(folder))):
                commit(place, None)
            discard(place)
        assert not hidden(folder)
        assert read(find(folder, "a")) in (["old"] if tag == "b" else ["old", "new"])
        assert find(folder, "a").name in [path.name for path in folder.iterdir()]
        is_there = (folder / tag).is_file() and read(find(folder, tag)) == "new"
        assert visible(folder).count("new") == is_there


def test_everything_is_synced_before_it_is_named(tmp_path, monkeypatch):
    """A power failure keeps only what was synced: the directory before its name, that before `<tag>`, ..."""
    Save(tmp_path, "a", "old")()
    calls = []
    intercept(monkeypatch, calls.append)
    Save(tmp_path, "a", "new")()
    pointer = ["fsync", "replace", "fsync"]
    steps = ["mkdir", "mkdir", "fsync", "rename", "fsync", *pointer, *pointer, "rename", "unlink"]
    assert calls[: len(steps)] == steps


def test_a_name_that_is_damaged_does_not_cost_the_checkpoint_before_the_next_is_complete(tmp_path):
    for number, name in enumerate(("rubbish", "a.7", "", "b.0")):
        folder = tmp_path / str(number)
        Save(folder, "a", "old")()
        (folder / "a").write_text(name)
        place = open_place(folder, "a")
        assert visible(folder) == ["old"]
        discard(place)
        Save(folder, "a", "new")()
        assert visible(folder) == [read(find(folder))] == ["new"]


def test_keep_last_removes_the_oldest_tags(tmp_path):
    for number in range(5):
        Save(tmp_path, f"step-{number}", str(number), keep_last=2)()
    Save(tmp_path, "step-3", "again", keep_last=2)()
    assert sorted(visible(tmp_path)) == ["4", "again"]
    assert read(find(tmp_path)) == "again"
    with pytest.raises(ValueError, match=re.escape("the tags there are: step-4, step-3")):
        find(tmp_path, "step-2")
    Save(tmp_path, "step-5", "5")()
    assert sorted(visible(tmp_path)) == ["4", "5", "again"]


def test_a_checkpoint_is_found_by_folder_by_tag_and_by_its_own_directory(tmp_path):
    Save(tmp_path, "a", "first")()
    Save(tmp_path, "b", "second")()
    for path, tag, content in (
        (tmp_path, None, "second"),
        (tmp_path, "a", "first"),
        (tmp_path / "a", None, "first"),
        (tmp_path / "latest", None, "second"),
        (tmp_path / "a.0", None, "first"),
    ):
        assert read(find(path, tag)) == content


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path):
    def refused(path, tag=None):
        with pytest.raises((ValueError, DamageError), match=r".+") as caught:
            find(path, tag)
        return str(caught.value)

    assert f"'{tmp_path / 'missing'}'" in refused(tmp_path / "missing")
    assert f"'{tmp_path}'" in refused(tmp_path)
    Save(tmp_path, "a", "content")()
    assert f"'{tmp_path / 'b'}'" in refused(tmp_path, "b")
    for text in ("b", "../a", "/etc/passwd", "", "a.0", "\x00", "\xff"):
        (tmp_path / LATEST).write_text(text)
        assert f"'{tmp_path / LATEST}'" in refused(tmp_path)
    (tmp_path / "b").write_text("a.0")
    assert refused(tmp_path, "b").startswith(
        f"{tmp_path / 'b'}: expected content in its format, found no name"
    )
    (tmp_path / "a").write_text("a.1")
    assert f"'{tmp_path / 'a.1'}'" in refused(tmp_path, "a")
    (tmp_path / "a.0" / MANIFEST).rename(tmp_path / "a.0" / "else")
    (tmp_path / "a").write_text("a.0")
    assert f"'{tmp_path / 'a.0'}'" in refused(tmp_path, "a")


@pytest.mark.parametrize(
    "tag",
    [
        *("", ".a", "a.", "a/b", "a\\b", "latest", " a", "a\n", "a\0", "\ud800"),
        *("ä" * 101, "a:b", None, 3, b"a", MANIFEST, VALUES, TENSORS),
    ],
)
def test_tags_that_could_be_mistaken_are_refused(tag):
    with pytest.raises(ValueError, match="tag: expected"):
        check_tag(tag)


@pytest.mark.parametrize(
    "tag", ["a", "step-100", "best_loss=0.5", "v1.0", "1", "a.tmp", "A" * 200, "a b", "ä", "-1", "a.0.1"]
)
def test_other_tags_are_names_of_files(tmp_path, tag):
    Save(tmp_path, check_tag(tag), "content")()
    assert read(find(tmp_path)) == read(find(tmp_path, tag)) == "content"


@pytest.mark.parametrize("num_saves", [2, pytest.param(3, marks=pytest.mark.long)])
def test_no_order_of_saves_lets_one_tag_touch_another_whose_name_is_like_its_directories(tmp_path, num_saves):
    tags = ("v1", "v1.0", "v1.1.0", "v1.0.name", "v1.tmp")
    for number, order in enumerate(itertools.product(tags, repeat=num_saves)):
        folder, want = tmp_path / str(number), {}
        folder.mkdir()
        for step, tag in enumerate(order):
            with suppress(ValueError):
                Save(folder, tag, f"{tag} of step {step}")()
                want[tag] = f"{tag} of step {step}"
            assert {tag: read(find(folder, tag)) for tag in want} == want
            assert sorted(visible(folder)) == sorted(want.values())
            assert not hidden(folder)
        for tag in set(tags) - want.keys():
            with pytest.raises(ValueError, match="expected a checkpoint with tag"):
                find(folder, tag)
        Save(folder, "last", "last", keep_last=1)()
        assert visible(folder) == ["last"]


def test_a_directory_of_such_a_name_that_holds_no_checkpoint_is_left_alone(tmp_path):
    (tmp_path / "run.0").mkdir()
    (tmp_path / "run.0" / "notes").write_text("the user's")
    for content in ("first", "second", "third"):
        Save(tmp_path, "run", content)()
        assert read(find(tmp_path, "run")) == content
    Save(tmp_path, "other", "last", keep_last=1)()
    assert (tmp_path / "run.0" / "notes").read_text() == "the user's"
