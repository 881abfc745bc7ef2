"""The optimizers and schedulers that are written instead of DeepSpeed's sections."""

import math
import re

import pytest
import torch

from zeroshard import Config


def lines(**sections):
    """The lines of the warning, by the name that they set."""
    with pytest.warns(UserWarning, match="initialize objects in place of") as caught:
        Config.from_deepspeed({"gradient_clipping": 0, **sections})
    return dict(re.findall(r"^ +(\w+) = (.*)$", str(caught[0].message), re.MULTILINE))


def built(model, **sections):
    """What the lines make."""
    names = {"torch": torch, "math": math, "model": model}
    for name, line in lines(**sections).items():
        names[name] = eval(line, names)
    return names["optimizer"], names.get("lr_scheduler")


def problem(**sections):
    with pytest.raises(ValueError, match="DeepSpeed config:") as caught:
        Config.from_deepspeed(sections)
    (line,) = str(caught.value).split("\n- ")[1:]
    return line


# ------------------------------------------------------------------------------------------- optimizer


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"type": "AdamW"}, "torch.optim.AdamW(model.parameters(), weight_decay=0.0)"),
        (
            {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "torch.optim.AdamW(model.parameters(), weight_decay=0.1, lr=0.0003, betas=(0.9, 0.95))",
        ),
        (
            {"type": "Adam", "params": {"lr": 1e-3}},
            "torch.optim.AdamW(model.parameters(), weight_decay=0.0, lr=0.001)",
        ),
        (
            {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False, "bias_correction": True}},
            "torch.optim.Adam(model.parameters(), weight_decay=0.0, lr=0.001)",
        ),
        (
            {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "torch.optim.AdamW(model.parameters(), lr=0.001)",
        ),
        (
            {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
        ),
        ({"type": "adagrad", "params": None}, "torch.optim.Adagrad(model.parameters())"),
    ],
)
def test_an_optimizer_is_torchs_with_the_defaults_of_deepspeed(section, expected):
    assert lines(optimizer=section) == {"optimizer": expected}


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (
            {"type": "Lamb"},
            "'Lamb' has no equivalent: its trust ratios are clamped; use zeroshard.optim.LAMB",
        ),
        ({"type": "Muon"}, "'Muon' has no equivalent: it needs whole tensors"),
        ({"type": "OneBitAdam"}, "'OneBitAdam' has no equivalent"),
        ({"type": "Lion"}, "'Lion' has no equivalent: use zeroshard.optim.Lion8bit"),
        ({"type": "AdamWW"}, "'AdamWW' is neither DeepSpeed's nor torch's; did you mean 'AdamW'?"),
        ({"type": "Optimizer"}, "'Optimizer' is neither DeepSpeed's nor torch's"),
        ({"params": {"lr": 1}}, "expected a section with a 'type' and 'params'"),
        ({"type": "AdamW", "params": {"lr": -1}}, "'optimizer.params': Invalid learning rate: -1"),
        ({"type": "AdamW", "params": {"learning_rate": 1}}, "unexpected keyword argument 'learning_rate'"),
        ({"type": "AdamW", "params": {"max_grad_norm": 1.0}}, "write gradient_clipping"),
        ({"type": "AdamW", "params": {"bias_correction": False}}, "has no equivalent in torch's Adam"),
        ({"type": "AdamW", "parms": {}}, "unknown key 'optimizer.parms'"),
    ],
)
def test_an_optimizer_that_torch_cannot_be_is_refused(section, text):
    assert text in problem(optimizer=section)


# ------------------------------------------------------------------------------------------- scheduler

SCHEDULES = [
    ("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 5}),
    ("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 5, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_min_lr": 0.002, "warmup_max_lr": 0.01, "warmup_num_steps": 5}),
    ("WarmupLR", {"warmup_num_steps": 1}),
    ("WarmupDecayLR", {"total_num_steps": 12, "warmup_num_steps": 4, "warmup_type": "linear"}),
    (
        "WarmupDecayLR",
        {"total_num_steps": 12, "warmup_min_lr": 1e-4, "warmup_max_lr": 2e-3, "warmup_num_steps": 4},
    ),
    ("WarmupDecayLR", {"total_num_steps": 3, "warmup_num_steps": 4}),
    ("WarmupCosineLR", {"total_num_steps": 12, "warmup_num_steps": 4}),
    (
        "WarmupCosineLR",
        {"total_num_steps": 12, "warmup_num_steps": 4, "cos_min_ratio": 0.1, "warmup_type": "linear"},
    ),
]
LR = 0.004


def rates(scheduler, optimizer, num_steps=16):
    """The rate at each optimizer step."""
    found = []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(("kind", "params"), SCHEDULES)
def test_a_schedule_gives_the_rates_of_deepspeed_at_every_step(kind, params):
    pytest.importorskip("deepspeed")
    from deepspeed.runtime import lr_schedules

    model = torch.nn.Linear(2, 2)
    sections = {
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "scheduler": {"type": kind, "params": params},
    }
    optimizer, scheduler = built(model, **sections)
    theirs = torch.optim.SGD(model.parameters(), lr=LR)
    expected = rates(getattr(lr_schedules, kind)(theirs, **params), theirs)
    assert rates(scheduler, optimizer) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_a_schedule_warms_up_to_its_own_rate_and_decays_to_zero():
    params = {"total_num_steps": 8, "warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}
    optimizer, scheduler = built(
        torch.nn.Linear(2, 2),
        optimizer={"type": "SGD", "params": {"lr": LR}},
        scheduler={"type": "WarmupDecayLR", "params": params},
    )
    expected = [0.0, 0.0, 0.125, 0.25, 0.375, 0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
    assert rates(scheduler, optimizer, len(expected)) == pytest.approx(expected)


def test_a_schedule_warms_up_by_the_logarithm_unless_told_otherwise():
    optimizer, scheduler = built(
        torch.nn.Linear(2, 2),
        optimizer={"type": "SGD", "params": {"lr": LR}},
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 9}},
    )
    expected = [0.0, 0.0, *(0.5 * math.log(step) / math.log(9) for step in range(2, 10)), 0.5, 0.5]
    assert rates(scheduler, optimizer, len(expected)) == pytest.approx(expected)


def test_a_cosine_falls_from_the_optimizers_rate_to_its_floor():
    params = {"total_num_steps": 8, "warmup_num_steps": 4, "warmup_type": "linear", "cos_min_ratio": 0.1}
    optimizer, scheduler = built(
        torch.nn.Linear(2, 2),
        optimizer={"type": "SGD", "params": {"lr": LR}},
        scheduler={"type": "WarmupCosineLR", "params": params},
    )
    falling = [0.1 + 0.9 * (1 + math.cos(math.pi * part)) / 2 for part in (0.25, 0.5, 0.75, 1.0, 1.0)]
    expected = [LR * ratio for ratio in (0.0, 0.0, 0.25, 0.5, 0.75, *falling)]
    assert rates(scheduler, optimizer, len(expected)) == pytest.approx(expected)


def test_a_schedule_without_an_optimizer_section_tells_the_rate_that_it_is_for():
    line = lines(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}})["lr_scheduler"]
    assert line.endswith("  # over an optimizer with lr=0.1")


def test_a_scheduler_of_torch_stays_as_it_is():
    section = {"type": "StepLR", "params": {"step_size": 10, "gamma": 0.5}}
    expected = "torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)"
    assert lines(scheduler=section) == {"lr_scheduler": expected}


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"type": "OneCycle", "params": {"cycle_max_lr": 0.1}}, "use torch.optim.lr_scheduler.OneCycleLR"),
        ({"type": "WarmupDecayLR"}, "'scheduler.params.total_num_steps': expected an integer >= 1"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "expected an integer >= 1, got 0"),
        (
            {"type": "WarmupLR", "params": {"warmup_type": "cubic"}},
            "expected 'log' or 'linear', got 'cubic'",
        ),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": "1"}}, "expected a number >= 0, got '1'"),
        (
            {"type": "WarmupLR", "params": {"warmup_steps": 3}},
            "unknown key 'scheduler.params.warmup_steps'; did",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_min_lr": 0.1}},
            "'scheduler.params.warmup_max_lr': expected",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
            "Trainer of transformers: warmup_steps",
        ),
        ({"type": "StepLR", "params": {}}, "'scheduler.params': "),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(section, text):
    assert text in problem(scheduler=section)
