"""torch's own transformer layers in evaluation compute as in training, as in plain PyTorch with a hook."""

import copy

import pytest
import torch
from torch import nn

from tests.distributed.training import SOME_STAGES, start

WIDTH, LENGTH = 16, 6


def layer(**options):
    return nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=True, **options)


class Encoder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.encoder = nn.TransformerEncoder(layer(**options), 3, enable_nested_tensor=True)

    def forward(self, x, mask):
        return self.encoder(self.first(x), src_key_padding_mask=mask)


class Layers(nn.Module):
    """The layers without torch's encoder around them, and attention alone."""

    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(7, WIDTH), nn.ModuleList(layer() for _ in range(2))
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x, mask):
        x = self.first(x)
        for each in self.layers:
            x = each(x, src_key_padding_mask=mask)
        for block in self.blocks:
            x = block(x, mask)
        return x


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x, mask):
        return x + self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]


MODELS = {"encoder with norms first": lambda: Encoder(norm_first=True), "layers": Layers}


def slowly(model, x, mask):
    """The output without fast paths, those of attention alone included."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return model(x, mask)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def evaluated(name, units):
    """How far evaluation is from plain PyTorch at each stage, and training losses that are not the same."""
    torch.manual_seed(0)
    model, found = MODELS[name](), []
    x = torch.randn(3, LENGTH, 7)
    mask = torch.arange(LENGTH)[None] >= torch.tensor([LENGTH, 4, 2])[:, None]
    for stage in SOME_STAGES:
        plain = copy.deepcopy(model)
        engine, optimizer = start(copy.deepcopy(model), "SGD", stage=stage, units=units)
        for _ in range(2):
            for context in (torch.no_grad(), torch.inference_mode()):
                with context:
                    want, got = slowly(plain.eval(), x, mask), engine.eval()(x, mask)
                distance = (got - want).abs().max().item()
                found += [f"stage {stage}: off by {distance:g}"] * (distance > 2e-6)
            losses = [net.train()(x, mask).square().mean() for net in (plain, engine)]
            found += [f"stage {stage}: losses {losses}"] * (abs(losses[0] - losses[1]).item() > 1e-6)
            losses[1].backward()
            optimizer.zero_grad()
    return found, engine.memory_report().unsharded


@pytest.mark.long_where(units=[None])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor is True")
@pytest.mark.parametrize("units", [None, ["TransformerEncoder"]])
@pytest.mark.parametrize("name", MODELS)
def test_evaluation_with_padding_masks_is_that_of_plain_pytorch(ranks, name, units):
    if name == "layers" and units:
        units = ["Attention"]
    assert ranks(2, evaluated, name, units) == [([], 0)] * 2
