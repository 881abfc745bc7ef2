"""torch's own transformer layers in evaluation compute as in training, as in plain PyTorch with a hook."""

import copy

import pytest
import torch
from torch import nn

from tests.distributed.training import start
from tests.ranks import on_ranks

WIDTH, LENGTH = 16, 6


def layer():
    return nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x, mask):
        return x + self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]


class Layers(nn.Module):
    """torch's encoder, its layers without the encoder around them, and attention alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers = nn.Linear(7, WIDTH), nn.ModuleList(layer() for _ in range(2))
        self.encoder = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=True)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x, mask):
        x = self.first(x)
        for each in self.layers:
            x = each(x, src_key_padding_mask=mask)
        x = self.encoder(x, src_key_padding_mask=mask)
        for block in self.blocks:
            x = block(x, mask)
        return x


def slowly(model, x, mask):
    """The output without fast paths, those of attention alone included."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return model(x, mask)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("units", [None, ["TransformerEncoder", "Attention"]])
@on_ranks(2)
def test_evaluation_with_padding_masks_is_that_of_plain_pytorch(units):
    model, x = Layers(), torch.linspace(-1, 1, 3 * LENGTH * 7).view(3, LENGTH, 7)
    mask = torch.arange(LENGTH)[None] >= torch.tensor([LENGTH, 4, 2])[:, None]
    plain = copy.deepcopy(model)
    engine, optimizer = start(model, "SGD", stage=3, units=units)
    for _ in range(2):
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                want, got = slowly(plain.eval(), x, mask), engine.eval()(x, mask)
            torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
        losses = [net.train()(x, mask).square().mean() for net in (plain, engine)]
        torch.testing.assert_close(*losses, rtol=0, atol=1e-6)
        losses[1].backward()
        optimizer.zero_grad()
    assert engine.memory_report().unsharded == 0
