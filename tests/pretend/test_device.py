from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import zeroshard
from tests.distributed.models import GPT
from tests.pretend.device import pretend_device
from tests.pretend.findings import Kind
from tests.ranks import on_ranks
from zeroshard.comm import collectives, mesh, streams


def trained(stage: int) -> dict[str, Tensor]:
    """The weights after a few steps."""
    torch.manual_seed(0)
    model = GPT(tied=False, num_blocks=2, width=16, heads=2)
    config = {"stage": stage, "clip_grad_norm": 1.0}
    engine = zeroshard.initialize(model, lambda p: torch.optim.AdamW(p, lr=1e-2), config).engine
    for number in range(3):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        tokens = torch.randint(0, 500, (2, 8), generator=generator)
        engine.backward(F.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten()))
        engine.step()
    return {name: value.clone() for name, value in engine.full_state_dict().items()}


@on_ranks(2)
def test_values_are_those_of_cpu_ranks_to_the_bit() -> None:
    """Also after a training over the pretend device."""
    before = trained(3)
    with pretend_device() as trace:
        pretended = trained(3)
    assert "reduce" in {stream for stream, _ in trace.kernels}
    after = trained(3)
    for name, value in before.items():
        assert torch.equal(value, pretended[name]), name
        assert torch.equal(value, after[name]), name


def patched() -> list[object]:
    return [
        *(vars(module)[name] for module, name in ((collectives, "dist"), (mesh, "dist"), (streams, "torch"))),
        streams.has_streams,
        streams.Streams.on,
        collectives.Axis.all_gather,
        torch.UntypedStorage.resize_,
        torch.Tensor.tolist,
    ]


@pytest.mark.parametrize("fails", [False, True])
@on_ranks(1)
def test_the_process_is_left_as_it_was(fails: bool) -> None:
    before = patched()
    with contextlib.suppress(LookupError), pretend_device():
        assert all(new is not old for new, old in zip(patched(), before, strict=True))
        if fails:
            raise LookupError
    assert all(new is old for new, old in zip(patched(), before, strict=True))


@on_ranks(1)
def test_memory_whose_device_is_spelled_cpu_is_the_host_s() -> None:
    """Else the host waits for the device before it reads a number that lies there."""
    for device, kinds in (("cpu", set()), (torch.device("cpu"), {Kind.SYNC})):
        with pretend_device() as trace:
            number = torch.empty((), device=device)
            number.copy_(torch.frombuffer(bytearray(4), dtype=torch.float32)[0], non_blocking=True)
            assert not number.item()
        assert {finding.kind for finding in trace.findings} == kinds


def test_no_module_keeps_a_function_that_is_patched() -> None:
    """A module that is first imported over the pretend device would keep its function for ever."""
    sources = Path(zeroshard.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if re.search(r"import .*\bhas_streams\b", path.read_text())] == []
