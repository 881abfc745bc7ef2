"""Layers that are read from a config.json are those of the model that transformers builds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.cli.main import main
from zeroshard.hf.outline import build_outline
from zeroshard.plan.units import find_units

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 10000,
    "hidden_size": 128,  # the embedding is large enough for a unit of its own
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PREFIXES = {
    "granite": "Granite",
    "llama": "Llama",
    "mistral": "Mistral",
    "olmo2": "Olmo2",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "wide heads": {"head_dim": 48, "num_key_value_heads": 1},
}


def config_of(kind: str, **more: Any) -> Any:
    given = SIZES | {"architectures": [f"{PREFIXES[kind]}ForCausalLM"]} | more
    return type(transformers.AutoConfig.for_model(kind))(**given)


def content_of(config: Any, folder: Path) -> dict[str, Any]:
    """What transformers writes into a config.json."""
    config.save_pretrained(folder)
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def layers_of(model: nn.Module) -> dict[str, Any]:
    units = find_units(model, None)
    return {
        "class": type(model).__name__,
        "classes": [(name, type(module).__name__) for name, module in model.named_modules() if name],
        "parameters": [(name, p.shape, p.dtype, p.device) for name, p in model.named_parameters()],
        "names": [name for name, _ in model.named_parameters(remove_duplicate=False)],
        "units": [(unit.name, unit.reason, [o.fqn for o in unit.originals]) for unit in units],
    }


def without_buffers_alone(found: dict[str, Any]) -> dict[str, Any]:
    """Leave out modules without parameters: activations and rotary angles."""
    named = [
        (name, kind)
        for name, kind in found["classes"]
        if any(p.startswith(f"{name}.") for p in found["names"])
    ]
    return found | {"classes": named}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", PREFIXES)
def test_names_shapes_and_units_are_those_of_transformers(tmp_path: Path, kind: str, variant: str) -> None:
    config = config_of(kind, **VARIANTS[variant])
    outlined = build_outline(content_of(config, tmp_path))
    assert outlined is not None
    with torch.device("meta"):
        model = getattr(transformers, f"{PREFIXES[kind]}ForCausalLM")(config)
    assert without_buffers_alone(layers_of(outlined)) == without_buffers_alone(layers_of(model))
    for stage in (0, 3):
        setting = {"stage": stage, "precision": "bf16"}
        assert zeroshard.estimate(outlined, 4, setting) == zeroshard.estimate(model, 4, setting)


@pytest.mark.parametrize(
    "changed",
    [
        {"model_type": "gemma"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": None},
        {"quantization_config": {"load_in_4bit": True}},
        {"auto_map": {"AutoModel": "own.Model"}},
        {"per_layer_config": {"0": {"intermediate_size": 100}}},
        {"num_key_value_heads": None},
        {"num_key_value_heads": 3},
        {"num_attention_heads": 3},
        {"head_dim": None},
        {"vocab_size": 0},
        {"hidden_size": 128.0},
        {"num_hidden_layers": True},
        {"tie_word_embeddings": None},
        {"mlp_bias": "yes"},
    ],
    ids=str,
)
def test_any_other_config_is_left_to_transformers(tmp_path: Path, changed: dict[str, Any]) -> None:
    content = content_of(config_of("llama"), tmp_path)
    assert build_outline(content) is not None
    assert build_outline(content | changed) is None


@pytest.mark.parametrize("left_out", ["vocab_size", "num_key_value_heads", "tie_word_embeddings"])
def test_a_config_that_leaves_out_a_size_is_left_to_transformers(tmp_path: Path, left_out: str) -> None:
    content = content_of(config_of("llama"), tmp_path)
    del content[left_out]
    assert build_outline(content) is None


def test_a_size_of_heads_that_is_left_out_is_a_part_of_the_width_but_for_qwen3(tmp_path: Path) -> None:
    for kind, is_known in (("llama", True), ("qwen3", False)):
        content = content_of(config_of(kind), tmp_path)
        del content["head_dim"]
        assert (build_outline(content) is not None) == is_known


def test_the_command_counts_parameters_without_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content_of(config_of("qwen2"), tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for given in (tmp_path, tmp_path / "config.json"):
        assert main(["estimate", str(given)]) == 0
        assert capsys.readouterr().out.startswith("Qwen2ForCausalLM with ")
    for options in (("--tokens", "64"), ("--tp", "2"), ("--pp", "2"), ("--lora", "8")):
        assert main(["estimate", str(tmp_path), *options]) == 2
        assert "needs transformers" in capsys.readouterr().err
