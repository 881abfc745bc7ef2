"""Build the sdist and the wheel, check them, and train with the wheel in an environment that has torch alone.

    python tools/package.py               # the environment links to the packages of this one: no download
    python tools/package.py --download    # pip installs them afresh, as a user's does: before a release

The environment has zeroshard and what zeroshard requires, with what that requires in turn. It has no extra:
no transformers, no bitsandbytes. So a requirement that is missing in pyproject.toml is found here. Links take
a second, and an installation of torch from a registry some minutes and gigabytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Callable, Iterable
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SMOKE = ROOT / "tools" / "smoke.py"
SHIPPED = ("zeroshard/py.typed", "zeroshard/__init__.py")
IN_SDIST = ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "tests/conftest.py")


class Built(NamedTuple):
    """The files that a release consists of."""

    sdist: Path
    wheel: Path


def build(folder: Path) -> Built:
    """Build both files from the checkout into `folder`, and check their metadata and their content.

    Raises:
        RuntimeError: a file is missing in one of them.
    """
    _forget_last_build()  # its list of files would be taken again
    _run([sys.executable, "-m", "build", "--outdir", folder, ROOT])
    _forget_last_build()  # a program that runs in the checkout would take it for an installation
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    _run([sys.executable, "-m", "twine", "check", "--strict", sdist, wheel])
    with tarfile.open(sdist) as archive:
        _require(IN_SDIST, {name.partition("/")[2] for name in archive.getnames()}, sdist)
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    _require(SHIPPED, names, wheel)
    foreign = sorted(name for name in names if not name.startswith(("zeroshard/", "zeroshard-")))
    if foreign:
        raise RuntimeError(f"{wheel.name}: expected zeroshard alone, got {foreign[:3]}")
    return Built(sdist, wheel)


def _forget_last_build() -> None:
    shutil.rmtree(ROOT / "zeroshard.egg-info", ignore_errors=True)


def _require(expected: Iterable[str], names: set[str], file: Path) -> None:
    if missing := [name for name in expected if name not in names]:
        raise RuntimeError(f"{file.name}: expected {', '.join(missing)} in it")


def required(
    requirements: Iterable[str], find: Callable[[str], Distribution] = distribution
) -> dict[str, Distribution]:
    """Return the installed packages that requirements need, directly or through each other, by name.

    Args:
        requirements: lines as in a package's metadata; lines for another platform are left out.
        find: returns the installed package of a name.

    Raises:
        PackageNotFoundError: a required package is not installed.
    """
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(line, "") for line in requirements]
    while waiting:
        line, extra = waiting.pop()
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        package = find(requirement.name)
        found[requirement.name.lower()] = package
        for wanted in ("", *sorted(requirement.extras)):
            if (requirement.name.lower(), wanted) not in seen:
                seen.add((requirement.name.lower(), wanted))
                waiting += [(line, wanted) for line in package.requires or ()]
    return found


def link(package: Distribution, folder: Path) -> None:
    """Link each file of an installed package into `folder`, a site-packages; scripts are left out.

    Raises:
        RuntimeError: the package has no list of its files.
    """
    if package.files is None:
        raise RuntimeError(f"{package.name}: expected a list of its files; give --download")
    for file in package.files:
        source, target = Path(str(package.locate_file(file))), folder / file
        if ".." not in file.parts and source.exists() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source.resolve())


def install(wheel: Path, folder: Path, *, download: bool) -> Path:
    """Make an environment in `folder` with the wheel and its requirements; return its Python."""
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    if not download:
        (site,) = folder.glob("lib/python3*/site-packages")
        with zipfile.ZipFile(wheel) as packed:
            (metadata,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
            packed.extractall(folder / "wheel")
        wanted = PathDistribution((folder / "wheel" / metadata).parent).requires or ()
        for package in required(wanted).values():
            link(package, site)
    # Without --download pip finds all requirements linked, or fails: it asks no registry.
    offline = [] if download else ["--no-index"]
    _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *offline, wheel])
    return python


def check(python: Path, folder: Path) -> None:
    """Run the commands of a new user, outside of the checkout and on CPUs: help, a plan, training steps."""
    command = python.with_name("zeroshard")
    two_ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    commands: list[list[str | Path]] = [
        [command, "--version"],
        [command, "--help"],
        [command, "estimate", "7B", "--precision", "bf16"],
        [command, "doctor"],
        [python, "-P", SMOKE],
        [python, *two_ranks, SMOKE],
    ]
    for words in commands:
        _run(words, cwd=folder)


def _run(command: list[str | Path], cwd: Path | None = None) -> None:
    """Run a command on CPUs, with no other package than its Python has; print its output only if it fails."""
    words = [str(word) for word in command]
    others = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: text for name, text in os.environ.items() if name not in others}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    done = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=cwd,
        env=environment,
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}")
    shown = " ".join(Path(word).name if word.startswith("/") else word for word in words)
    print(f"  {time.monotonic() - begin:5.1f} s  {shown}", flush=True)


def main() -> None:
    """Build, check, install, train; leave both files in dist/."""
    parser = argparse.ArgumentParser(description="Build and try the files of a release.")
    parser.add_argument("--download", action="store_true", help="install all requirements afresh")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder for both files (dist)")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            built = build(folder / "dist")
            check(install(built.wheel, folder / "venv", download=options.download), folder)
            options.output.mkdir(parents=True, exist_ok=True)
            for file in built:
                (options.output / file.name).write_bytes(file.read_bytes())
    except (RuntimeError, OSError, ImportError) as error:
        sys.exit(f"package.py: {error}")
    print("\n".join(str(options.output / file.name) for file in built))


if __name__ == "__main__":
    main()
