"""`import zeroshard` and its public names: nothing of torch or the process changes, and little is loaded."""

from __future__ import annotations

import ast
import atexit
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MISSING = object()
MADE_BY_PYTHON = {"__builtins__", "__annotations__", "__path__"}


def report_of(function: str) -> Any:
    """What a function of this file tells in a process of its own."""
    code = f"import json; from tests import test_import; print(json.dumps(test_import.{function}()))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


# ------------------------------------------------------------------------------------- what is changed


def of_torch() -> dict[str, Any]:
    """All attributes of the modules and classes of torch that are loaded."""
    found: dict[str, Any] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "torch":
            continue
        # By type(): isinstance asks a deprecated object for its class, and so makes it warn.
        classes = {
            f"{module_name}.{key}": value
            for key, value in list(vars(module).items())
            if issubclass(type(value), type) and value.__module__ == module_name
        }
        for owner_name, owner in {module_name: module, **classes}.items():
            for key, value in list(vars(owner).items()):
                if not issubclass(type(value), ModuleType) and key not in MADE_BY_PYTHON:
                    found[f"{owner_name}.{key}"] = value
                    if issubclass(type(value), dict | list | set):
                        found[f"length of {owner_name}.{key}"] = len(value)
    return found


def of_process() -> dict[str, Any]:
    """What else is one for the whole process."""
    import torch

    backends = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark)
    return {
        "backends": [*backends, torch.get_float32_matmul_precision()],
        "operators": sorted(torch._C._dispatch_get_all_op_names()),
        "settings": [torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()],
        "generator": torch.get_rng_state().tolist(),
        "safe globals": torch.serialization.get_safe_globals(),
        "functions at exit": atexit._ncallbacks(),
        "warnings": [warnings.showwarning, *warnings.filters],
        "environment": dict(os.environ),
        "random": random.getstate(),
        "sys": [*sys.meta_path, *sys.path, sys.excepthook, sys.unraisablehook, threading.excepthook],
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "threads": [thread.name for thread in threading.enumerate()],
        "log handlers": [list(logging.root.handlers), logging.root.level],
    }


def changes() -> dict[str, list[str]]:
    """What differs after `import zeroshard` and its names; and the modules that they load beside torch's."""
    import torch  # noqa: F401

    process_before, torch_before, modules_before = of_process(), of_torch(), set(sys.modules)
    import zeroshard

    for name in zeroshard.__all__:
        getattr(zeroshard, name)
    loaded = sorted(set(sys.modules) - modules_before)
    torch_after, process_after = of_torch(), of_process()
    differing = [name for name, value in process_before.items() if process_after[name] != value]
    for name, value in torch_after.items():  # tensors and their like have an == of their own
        before = torch_before.get(name, MISSING)
        if before is not value and not (type(before) is type(value) is int and before == value):
            differing.append(name)
    return {"differing": differing + sorted(torch_before.keys() - torch_after.keys()), "loaded": loaded}


@pytest.fixture(scope="module")
def changed() -> dict[str, list[str]]:
    return report_of("changes")


@pytest.mark.long  # it walks through all of torch, which `import zeroshard` alone does not load
def test_import_changes_nothing_of_torch_or_the_process(changed: dict[str, list[str]]) -> None:
    assert changed["differing"] == []


# -------------------------------------------------------------------------------------- what is loaded


@pytest.mark.long
def test_import_loads_nothing_heavy(changed: dict[str, list[str]]) -> None:
    roots = {name: name.partition(".")[0] for name in changed["loaded"]}
    assert not {name for name, root in roots.items() if root not in {"zeroshard", *sys.stdlib_module_names}}
    few_use = {f"zeroshard.{part}" for part in ("cli", "deepspeed.translate", "optim.eightbit.kernels")}
    assert not {"torch.distributed.checkpoint", *few_use} & roots.keys()


# ------------------------------------------------------------------------------- what is loaded at once


def light() -> list[str]:
    """The modules that `import zeroshard` and the help of the command line load, outside of Python's own."""
    import contextlib
    import io

    import zeroshard  # noqa: F401
    from zeroshard.cli.main import main

    for arguments in (["--help"], ["--version"], ["estimate", "--help"]):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            main(arguments)
    roots = {name.partition(".")[0] for name in sys.modules}
    return sorted(roots & {"numpy", "psutil", "rich", "torch", "transformers"})


def test_the_package_and_the_help_of_its_commands_need_no_torch() -> None:
    assert report_of("light") == []


def test_type_checkers_see_the_names_that_are_imported_when_they_are_used() -> None:
    import zeroshard

    body = ast.parse(Path(zeroshard.__file__).read_text(encoding="utf-8")).body
    (seen,) = (
        node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = [node for node in seen.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module for node in imports for alias in node.names}
    assert all(alias.asname == alias.name for node in imports for alias in node.names)  # exported by that
    assert sorted(homes) == zeroshard.__all__
    assert homes.pop("optim") == "zeroshard"
    assert homes == {name: f"zeroshard.{home}" for name, home in zeroshard._HOMES.items()}
    for name, home in homes.items():
        assert getattr(zeroshard, name) is getattr(import_module(home), name)
        # An import of such a module would put it in the place of the name.
        assert not (ROOT / "zeroshard" / name).exists()
        assert not (ROOT / "zeroshard" / f"{name}.py").exists()
    assert set(dir(zeroshard)) >= set(zeroshard.__all__)
    with pytest.raises(AttributeError, match="module 'zeroshard' has no attribute 'enigne'"):
        _ = zeroshard.enigne
