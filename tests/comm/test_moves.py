"""Tensors of several devices; the meta device stands for an accelerator."""

from __future__ import annotations

import torch

from zeroshard.comm import moves
from zeroshard.stepping.clipping import scale_


def test_tensors_are_grouped_by_their_device_in_their_order() -> None:
    tensors = [torch.zeros(1, device=device) for device in ("meta", "cpu", "meta", "cpu")]
    assert moves.by_device(tensors) == [[0, 2], [1, 3]]
    assert moves.by_device([]) == []


def test_a_tensor_moves_to_the_device_of_another_one_or_stays_as_it_is() -> None:
    here, there = torch.ones(3), torch.ones(2, device="meta")
    assert moves.beside(here, torch.zeros(1)) is here
    assert moves.beside(here, there).device == there.device
    assert moves.to_device(here, torch.device("meta")).shape == here.shape


def test_gradients_on_two_devices_are_scaled_by_one_factor() -> None:
    narrow = torch.full((4,), 2.0, dtype=torch.bfloat16)
    tensors = [torch.ones(3, device="meta"), torch.full((2,), 4.0), narrow, narrow.to("meta")]
    scale_(tensors, torch.tensor(0.5))
    assert tensors[1].tolist() == [2.0, 2.0]
    assert narrow.tolist() == [1.0] * 4
