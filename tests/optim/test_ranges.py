"""Hyperparameters out of their ranges are refused, also in a group."""

import math

import pytest
import torch
from torch import nn

from zeroshard.optim import LAMB, LARS, AdamW8bit, AdEMAMix8bit, Lion8bit, Muon, SGD8bit

REFUSED = [
    (AdamW8bit, {"lr": -1}, "lr: expected a finite number >= 0, got -1"),
    (AdamW8bit, {"lr": math.nan}, "lr: expected a finite number >= 0, got nan"),
    (AdamW8bit, {"lr": math.inf}, "lr: expected a finite number >= 0, got inf"),
    (AdamW8bit, {"betas": (0.9, 1.0)}, "betas: expected 2 numbers from 0 to below 1"),
    (AdamW8bit, {"betas": (0.9,)}, "betas: expected 2 numbers from 0 to below 1"),
    (AdamW8bit, {"betas": 0.9}, "betas: expected 2 numbers from 0 to below 1"),
    (AdamW8bit, {"eps": "small"}, "eps: expected a finite number >= 0, got 'small'"),
    (AdEMAMix8bit, {"betas": (0.9, 0.999)}, "betas: expected 3 numbers from 0 to below 1"),
    (AdEMAMix8bit, {"t_alpha": 0}, "t_alpha: expected a number above 0 or None, got 0"),
    (Lion8bit, {"weight_decay": -0.1}, "weight_decay: expected a finite number >= 0"),
    (SGD8bit, {"momentum": 0}, "momentum: expected a number above 0 and below 1, got 0"),
    (AdamW8bit, {"min_8bit_size": True}, "min_8bit_size: expected an integer >= 0, got True"),
    (AdamW8bit, {"min_8bit_size": -1}, "min_8bit_size: expected an integer >= 0, got -1"),
    (LARS, {"lr": -1.0}, "lr: expected a finite number >= 0, got -1.0"),
    (LARS, {"momentum": 1.0}, r"momentum: expected a number in \[0, 1\), got 1.0"),
    (LARS, {"weight_decay": "0"}, "weight_decay: expected a finite number >= 0, got '0'"),
    (LARS, {"trust_coefficient": -0.1}, "trust_coefficient: expected a finite number >= 0"),
    (LARS, {"trust_ratio": 1}, "trust_ratio: expected True or False, got 1"),
    (LAMB, {"betas": (0.9, 1.0)}, r"betas: expected 2 numbers from 0 to below 1, got \(0.9, 1.0\)"),
    (LAMB, {"eps": -1e-8}, "eps: expected a finite number >= 0"),
    (LAMB, {"weight_decay": True}, "weight_decay: expected a finite number >= 0, got True"),
    (Muon, {"lr": -1.0}, "lr: expected a finite number >= 0, got -1.0"),
    (Muon, {"momentum": 1.0}, r"momentum: expected a number in \[0, 1\), got 1.0"),
    (Muon, {"weight_decay": math.nan}, "weight_decay: expected a finite number >= 0, got nan"),
    (Muon, {"eps": -1e-8}, "eps: expected a finite number >= 0"),
    (Muon, {"nesterov": 1}, "nesterov: expected True or False, got 1"),
    (Muon, {"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients: expected three numbers, got \(1.0, 2.0\)"),
    (Muon, {"ns_steps": 100}, r"ns_steps: expected an integer in \[0, 99\], got 100"),
    (Muon, {"adjust_lr_fn": "rms"}, "adjust_lr_fn: expected 'original', 'match_rms_adamw', .* got 'rms'"),
    (Muon, {"split": 0}, "split: expected a number of matrices, a tuple of their rows, or None, got 0"),
    (Muon, {"split": [2, 4]}, r"split: expected a number of matrices, .* got \[2, 4\]"),
    (Muon, {"split": (4, 4)}, r"parameter 0 of group 0: split=\(4, 4\) does not fill the 6 rows"),
    (Muon, {"split": 4}, r"parameter 0 of group 0: split=4 does not fill the 6 rows of shape \[6, 5\]"),
    (Muon, {"use_muon": "yes"}, "use_muon: expected True or False, got 'yes'"),
    (Muon, {"use_muon": False, "betas": (0.9, 1.0)}, "betas: expected 2 numbers from 0 to below 1"),
    (Muon, {"use_muon": False, "nesterov": True}, "is stepped by AdamW; it has no 'nesterov'"),
]


@pytest.mark.parametrize(("kind", "options", "text"), REFUSED)
def test_a_hyperparameter_out_of_its_range_is_refused_also_in_a_group(kind, options, text):
    parameters = [nn.Parameter(torch.ones(6, 5))]
    if "use_muon" not in options:
        with pytest.raises(ValueError, match=text):
            kind(parameters, **({"lr": 0.1} | options))
    with pytest.raises(ValueError, match=text):
        kind([{"params": parameters} | options], lr=0.1)
