"""Calls of the command line in this process, for the tests of its commands."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from torch import nn

from zeroshard.cli.main import main

ROOT = Path(__file__).parents[1]


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command prints that ends well."""
    assert main(list(map(str, arguments))) == 0
    out, err = capsys.readouterr()
    assert "zeroshard:" not in err  # packages that are imported may warn
    return out


def failure(capsys: pytest.CaptureFixture[str], *arguments: object, prints: bool = False) -> tuple[int, str]:
    """The exit code and the one line of a command that fails; `prints` for one that prints before."""
    try:
        code = main(list(map(str, arguments)))
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    assert prints or not out
    *_, last = err.splitlines(keepends=True)  # packages that are imported may warn before it
    assert last.startswith("zeroshard: ")
    assert err.count("zeroshard: ") == 1
    return code, last


def environment(**more: str) -> dict[str, str]:
    """What a script gets that starts ranks by itself."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in names}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


def rows(text: str, gap: int = 2) -> dict[str, list[str]]:
    """The cells of each line of the tables, by the first one; some spaces are between two cells."""
    lines = [re.split(rf"\s{{{gap},}}", line.strip()) for line in text.splitlines()]
    return {name: cells for name, *cells in lines if cells}


def examples(page: str, command: str) -> list[tuple[list[str], str]]:
    """The arguments and the outputs that a page of the docs shows of a command."""
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    found = re.findall(rf"```\n\$ zeroshard {command} ((?:[^\n]*\\\n)*[^\n]*)\n(.*?)```", text, re.DOTALL)
    return [(arguments.replace("\\", "").split(), printed) for arguments, printed in found]


def write_llama(folder: Path) -> nn.Module:
    """Write the config of a small Llama, and return the model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    config.architectures, config.dtype = [type(model).__name__], "bfloat16"
    config.save_pretrained(folder)
    return model.float()
