"""DeepSpeed's `optimizer` and `scheduler` sections, as lines of torch that do the same.

A Config cannot hold objects, and zeroshard takes torch's. DeepSpeed's warmup schedules become factors of a
LambdaLR. They count from one step later than torch's schedulers: their first two steps have the same rate.
"""

import difflib
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zeroshard.deepspeed.keys import auto, is_number

_WHOLE_TENSOR = (
    "it needs whole tensors and a rank holds slices; use zeroshard.optim.Muon, which gets whole ones"
)
_OTHER_LAMB = "its trust ratios are clamped; use zeroshard.optim.LAMB, which has the paper's form"
_NOT_IN_TORCH = "it is not in torch; use AdamW, or give initialize an element-wise optimizer of your own"
_REFUSED = {
    **dict.fromkeys(("lamb", "onebitlamb"), _OTHER_LAMB),
    "muon": _WHOLE_TENSOR,
    **dict.fromkeys(("muadam", "muadamw", "musgd", "onebitadam", "zerooneadam"), _NOT_IN_TORCH),
    "lion": "use zeroshard.optim.Lion8bit, or give initialize an element-wise optimizer of your own",
    "onecycle": "use torch.optim.lr_scheduler.OneCycleLR or CyclicLR",
    "lrrangetest": "use torch.optim.lr_scheduler.LambdaLR",
}

_RISE = {"warmup_num_steps": 1000, "warmup_type": "log"}
_SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {**_RISE, "warmup_min_lr": 0.0, "warmup_max_lr": None},
    "WarmupDecayLR": {**_RISE, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "total_num_steps": None},
    "WarmupCosineLR": {**_RISE, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, "total_num_steps": None},
}
"""DeepSpeed's own schedules, with the defaults of their parameters."""


def torch_lines(optimizer: Any, scheduler: Any) -> tuple[list[str], list[str]]:
    """Return the lines to write in place of the two sections, and their problems; each list may be empty.

    Args:
        optimizer: the section of that name; None if the config has none.
        scheduler: the section of that name; None if the config has none.
    """
    lines: list[str] = []
    problems: list[str] = []
    peak_lr = None
    if scheduler is not None:
        try:
            line, peak_lr = _scheduler_line(*_parsed("scheduler", scheduler))
            lines.append(f"lr_scheduler = {line}")
            if optimizer is None and peak_lr is not None:
                lines[0] += f"  # over an optimizer with lr={peak_lr!r}"
        except ValueError as error:
            problems.append(str(error))
    if optimizer is not None:
        try:
            lines.insert(0, f"optimizer = {_optimizer_line(*_parsed('optimizer', optimizer), peak_lr)}")
        except ValueError as error:
            problems.append(str(error))
    return lines, problems


def _parsed(name: str, section: Any) -> tuple[str, dict[str, Any]]:
    """Return the type and the parameters of a section. Raises ValueError listing its problems."""
    kind = section.get("type") if isinstance(section, Mapping) else None
    params = (section.get("params") or {}) if isinstance(section, Mapping) else None
    if not isinstance(kind, str) or not isinstance(params, Mapping):
        raise ValueError(f"'{name}': expected a section with a 'type' and 'params', got {section!r:.200}")
    refused = _REFUSED.get(kind.lower().replace("_", ""))
    if refused:
        raise ValueError(f"'{name}.type': {kind!r} has no equivalent: {refused}")
    problems = [
        f"unknown key '{name}.{key}'" for key in section if key not in ("type", "params", "legacy_fusion")
    ]
    for key, value in params.items():
        if value == "auto" or (isinstance(value, list) and "auto" in value):
            problems.append(f"'{name}.params.{key}': {auto(f'{name}.params.{key}')}")
    if problems:
        raise ValueError("\n- ".join(problems))
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    return kind, {key: value for key, value in values.items() if value is not None}


# ------------------------------------------------------------------------------------------- optimizer


def _optimizer_line(kind: str, params: dict[str, Any], peak_lr: float | None) -> str:
    """Return the line for an optimizer with DeepSpeed's defaults; a schedule's `peak_lr` replaces `lr`."""
    if "max_grad_norm" in params:
        raise ValueError("'optimizer.params.max_grad_norm' has no equivalent: write gradient_clipping")
    if kind.lower() in ("adam", "adamw"):
        kind, params = _adam(kind, params)
    elif kind.lower() == "adagrad":
        kind = "Adagrad"
    if peak_lr is not None:
        params = params | {"lr": peak_lr}
    return _checked("optimizer", torch.optim, Optimizer, kind, [nn.Parameter(torch.empty(1))], params)


def _adam(kind: str, params: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return class and arguments of DeepSpeed's Adam: by default it decays as AdamW does, by 0."""
    own = {"torch_adam": False, "adam_w_mode": True, "bias_correction": True}
    own |= {"fp32_optimizer_states": True, "set_grad_none": True}
    asked = {key: params.get(key, default) for key, default in own.items()}
    if not asked["bias_correction"]:
        raise ValueError("'optimizer.params.bias_correction': false has no equivalent in torch's Adam")
    kind = "AdamW" if kind.lower() == "adamw" or asked["adam_w_mode"] else "Adam"
    defaults = {} if asked["torch_adam"] else {"weight_decay": 0.0}
    return kind, defaults | {key: value for key, value in params.items() if key not in own}


# ------------------------------------------------------------------------------------------- scheduler


def _scheduler_line(kind: str, params: dict[str, Any]) -> tuple[str, float | None]:
    """Return the line for a scheduler, and the learning rate that it needs from the optimizer, if any."""
    if kind not in _SCHEDULES:
        optimizer = SGD([nn.Parameter(torch.empty(1))], lr=1.0)
        return _checked("scheduler", torch.optim.lr_scheduler, LRScheduler, kind, optimizer, params), None
    _check_schedule(kind, params)
    asked = _SCHEDULES[kind] | params
    peak_lr = asked.get("warmup_max_lr")
    floor = asked["warmup_min_lr"] / peak_lr if peak_lr else asked.get("warmup_min_ratio", 0.0)
    rise, num_rising = _rise(asked)
    if kind == "WarmupLR":
        factor = _above(floor, f"min(1.0, {rise})")
    else:
        num_falling = max(1, asked["total_num_steps"] - num_rising)
        if kind == "WarmupDecayLR":
            fall = f"max(0.0, ({asked['total_num_steps'] + 1} - step) / {num_falling})"
            factor = _above(floor, f"{rise} if step <= {num_rising} else {fall}")
        else:
            wave = f"(1 + math.cos(math.pi * min(1.0, (step - {num_rising}) / {num_falling}))) / 2"
            fall = _above(asked["cos_min_ratio"], wave)
            factor = f"{_above(floor, rise)} if step <= {num_rising} else {fall}"
    return f"torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: {factor})", peak_lr


def _rise(asked: Mapping[str, Any]) -> tuple[str, int]:
    """Return the factor that rises from 0 to 1, and the number of its steps."""
    num_steps = max(2, asked["warmup_num_steps"])
    if asked["warmup_type"] == "linear":
        return f"max(step - 1, 0) / {num_steps}", num_steps
    return f"math.log(max(step, 1), {num_steps})", num_steps


def _above(floor: float, factor: str) -> str:
    """Return the text of a factor from 0 to 1 that starts from a floor instead."""
    return f"{floor!r} + {1 - floor!r} * ({factor})" if floor else factor


def _check_schedule(kind: str, params: dict[str, Any]) -> None:
    known = _SCHEDULES[kind]
    problems = []
    for key, value in params.items():
        name = f"scheduler.params.{key}"
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            problems.append(f"unknown key '{name}'" + (f"; did you mean '{close[0]}'?" if close else ""))
        elif key.endswith("_num_steps") and not is_number(value, 1, Integral):
            problems.append(f"'{name}': expected an integer >= 1, got {value!r}")
        elif key == "warmup_type" and value not in ("log", "linear"):
            problems.append(f"'{name}': expected 'log' or 'linear', got {value!r}")
        elif key != "warmup_type" and not is_number(value):
            problems.append(f"'{name}': expected a number >= 0, got {value!r}")
    if "total_num_steps" in known and "total_num_steps" not in params:
        problems.append(f"'scheduler.params.total_num_steps': expected an integer >= 1, {kind} needs it")
    asked = known | params
    if asked.get("warmup_min_lr") and not asked.get("warmup_max_lr"):
        problems.append("'scheduler.params.warmup_max_lr': expected a number > 0, above warmup_min_lr")
    if problems:
        raise ValueError("\n- ".join(problems))


def _checked(section: str, module: Any, base: Any, kind: str, first: Any, params: Mapping[str, Any]) -> str:
    """Return the line that makes an object of torch, after making one."""
    made = getattr(module, kind, None)
    if not (isinstance(made, type) and issubclass(made, base)) or made is base:
        names = [name for name, value in vars(module).items() if isinstance(value, type)]
        names += _SCHEDULES if section == "scheduler" else []
        close = difflib.get_close_matches(kind, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"'{section}.type': {kind!r} is neither DeepSpeed's nor torch's{hint}")
    try:
        made(first, **params)
    except (TypeError, ValueError) as error:
        raise ValueError(f"'{section}.params': {error}") from None
    over = "model.parameters()" if section == "optimizer" else "optimizer"
    arguments = [over, *(f"{key}={value!r}" for key, value in params.items())]
    return f"{module.__name__}.{kind}({', '.join(arguments)})"
