"""Facts about a model that others need beside its weights: plain values, which a manifest holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def describe_model(module: Any) -> dict[str, Any]:
    """Describe a model for the manifest: its class, and what an export by transformers or peft needs.

    Args:
        module: the model; one of transformers or peft adds the contents of its config files, and the names
            that its file of weights leaves out or ties.
    """
    described: dict[str, Any] = {"class": type(module).__name__}
    for key in ("config", "generation_config"):
        if callable(to_json := getattr(getattr(module, key, None), "to_json_string", None)):
            described[key] = json.loads(to_json())
    if "config" in described:
        described["config"]["architectures"] = [type(module).__name__]
    if callable(tied := getattr(module, "get_expanded_tied_weights_keys", None)):
        described["tied"] = tied(all_submodels=True)
    if not_saved := getattr(module, "_keys_to_ignore_on_save", None):
        described["not_saved"] = sorted(not_saved)
    if adapters := getattr(module, "peft_config", None):
        described["adapters"] = sorted(adapters)
    return described


def saved_names(model: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The names under which others expect a parameter in a file.

    Args:
        model: what `describe_model` gave.
        names: all of the parameter's, the first one first.
    """
    wanted = [name for name in names if name not in model.get("not_saved", ())]
    if "tied" not in model:
        return wanted[:1]
    # transformers ties these again; a name that the user tied would be missing.
    return [name for name in wanted if name not in model["tied"]] or wanted[:1]
