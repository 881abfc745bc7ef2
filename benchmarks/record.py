"""Write a benchmark's rows as JSON, with the facts that one needs to judge and to repeat them."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import tables
from documents import read, without_folders

RESULTS = Path(__file__).parent / "results"
COMPARED = ("torch", "zeroshard", "deepspeed", "bitsandbytes", "torchao", "numba")


def console(quiet: bool = False) -> Console:
    """A console whose tables keep their columns when the output goes to a file."""
    terminal = Console(quiet=quiet)
    return terminal if terminal.is_terminal else Console(quiet=quiet, width=160)


def _cpu_model() -> str:
    """The processor's name as Linux gives it, else as Python does."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory in GB, and GPUs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 2**30, 1),
        "gpus": gpus,
        "system": f"{platform.system()} {platform.machine()}",
    }


def status_bytes(key: str) -> int:
    """VmRSS (resident now) or VmHWM (at the peak) of this process.

    Not `getrusage`: its maximum is inherited from the process that started this one.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"Expected a line {key} in /proc/self/status, got none: this benchmark needs Linux")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries compared; None where one isn't installed."""
    packages = {name: _version(name) for name in COMPARED}
    if packages["zeroshard"] is None:  # run from a checkout
        project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
        packages["zeroshard"] = project["project"]["version"]
    return {"python": platform.python_version(), **packages}


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write(name: str, rows: Any, **extra: Any) -> Path:
    """Write `results/<name>.json` and return its path. A name may begin with a folder: `page/memory`."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    script = Path(sys.argv[0])
    document = {
        "benchmark": name,
        "command": shlex.join(["python", f"benchmarks/{script.name}", *without_folders(sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(
            _git("status", "--porcelain", "--untracked-files=no", "--", "../zeroshard")
        ),
        "machine": machine(),
        "versions": versions(),
        "load_average": os.getloadavg(),
        **extra,
        "rows": rows,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def report(kind: str, name: str, rows: Any, **extra: Any) -> Path:
    """Write a document, print its table and where it is, and return its path."""
    path = write(name, rows, **extra)
    print(tables.TABLES[kind](read(path)).markdown())
    console().print(f"wrote {path.relative_to(RESULTS.parent.parent)}", markup=False)
    return path
