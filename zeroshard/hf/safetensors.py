"""Folders of transformers: the files of safetensors in them, and the index that lists their tensors."""

from __future__ import annotations

import os
from pathlib import Path

from zeroshard.safetensors import FileTensor, parse_json, read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def find_tensors(folder: str | os.PathLike[str]) -> dict[str, FileTensor]:
    """Return the tensors of a checkpoint by name: of model.safetensors, or of the files in its index.

    Raises:
        ValueError: no such folder, or no safetensors checkpoint in it; a file that is missing or damaged.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"expected a folder on this machine (nothing is downloaded), got '{folder}'")
    if (path / SINGLE).is_file():
        return read_header(path / SINGLE)
    if not (path / INDEX).is_file():
        pickled = [file.name for file in path.glob("*.bin")]
        hint = f"; {pickled[0]} is a pickle, which could run code: convert it" if pickled else ""
        raise ValueError(f"'{folder}': expected {SINGLE} or {INDEX}, found neither{hint}")
    places = _read_index(path / INDEX)
    files = {name: read_header(path / name) for name in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in files[file]:
            raise ValueError(f"{path / file}: expected tensor '{name}', as {INDEX} says, found none")
    return {name: files[file][name] for name, file in places.items()}


def _read_index(file: Path) -> dict[str, str]:
    """Return the name of the file of each tensor, which is a file beside the index."""
    try:
        index = parse_json(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{file}: can't be read: {error.strerror}") from None
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict):
        raise ValueError(f"{file}: expected JSON with a 'weight_map' of names of tensors and files, got none")
    for name, place in places.items():
        if not isinstance(place, str) or not _is_file_name(place):
            raise ValueError(f"{file}: tensor '{name}': expected the name of a file beside it, got {place!r}")
    return places


def _is_file_name(name: str) -> bool:
    return name.isprintable() and os.path.basename(name) == name and name not in ("", ".", "..")
