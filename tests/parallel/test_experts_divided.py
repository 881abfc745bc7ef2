"""The cuts of experts over tensor ranks; `test_models.py` trains them."""

import re

import pytest
import torch
from torch import nn

from zeroshard.parallel.tensor.division import match


class Experts(nn.Module):
    def __init__(self, *, bias=False, **attributes):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(3, 8, 5))
        self.down_proj = nn.Parameter(torch.ones(3, 5, 4))
        if bias:
            self.down_bias = nn.Parameter(torch.ones(3, 5))
        vars(self).update(attributes)


WORDS = {
    "experts": "moe_tp_experts",
    "experts.gate_up_proj": "packed_colwise",
    "experts.down_proj": "rowwise",
}


def test_each_rank_has_a_part_of_the_gate_and_of_the_up_of_each_expert():
    (layer,) = match(nn.ModuleDict({"experts": Experts()}), WORDS, 2)
    gate_up, down = layer.cuts["gate_up_proj"], layer.cuts["down_proj"]
    assert (gate_up.local_shape, down.local_shape) == ((3, 4, 5), (3, 5, 2))
    assert [(span.start, span.stop) for span in gate_up.spans(1)] == [(2, 4), (6, 8)]
    assert [(span.start, span.stop) for span in down.spans(1)] == [(2, 4)]


@pytest.mark.parametrize(
    ("experts", "words", "text"),
    [
        ({}, {"experts.down_proj": "replicate"}, "got 'experts.down_proj' of shape (3, 5, 4) with 'repl"),
        ({"bias": True}, {}, "got 'experts.down_bias' of shape (3, 5) with 'replicate'"),
        ({"bias": True}, {"experts.down_bias": "colwise"}, "got 'experts.down_bias' of shape (3, 5) with"),
        ({"has_post_expert_norm": True}, {}, "'experts' normalizes the output of each expert"),
        ({"is_concatenated": False}, {}, "the gate and up of 'experts' alternate; expected no 'packed_colw"),
        ({}, {"other": "rowwise"}, "no module of the model is called 'other'"),
    ],
)
def test_experts_whose_outputs_would_not_add_up_are_refused(experts, words, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        match(nn.ModuleDict({"experts": Experts(**experts)}), WORDS | words, 2)


def test_hidden_elements_that_do_not_divide_are_refused_with_the_numbers():
    text = "'experts.gate_up_proj', dimension 1 of shape (3, 8, 5): 4 elements cannot be divided over mesh.t"
    with pytest.raises(ValueError, match=re.escape(text)):
        match(nn.ModuleDict({"experts": Experts()}), WORDS, 3)
