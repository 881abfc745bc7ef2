from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import zeroshard
from tests.distributed.models import GPT
from tests.pretend.device import pretend_device
from tests.pretend.findings import Kind
from tests.ranks import Ranks
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


def differences(stage: int) -> list[str]:
    """Weights that are others over the pretend device than without it, before and after."""
    before = trained(stage)
    with pretend_device() as trace:
        pretended = trained(stage)
    assert "reduce" in {stream for stream, _ in trace.kernels}
    after = trained(stage)
    return [
        name
        for name, value in before.items()
        if not (torch.equal(value, pretended[name]) and torch.equal(value, after[name]))
    ]


def test_values_are_those_of_cpu_ranks_to_the_bit(ranks: Ranks) -> None:
    assert ranks(2, differences, 3) == [[], []]


def patched() -> list[object]:
    return [
        *(vars(module)[name] for module, name in ((collectives, "dist"), (mesh, "dist"), (streams, "torch"))),
        streams.has_streams,
        streams.Streams.on,
        collectives.Axis.all_gather,
        torch.UntypedStorage.resize_,
        torch.Tensor.tolist,
    ]


def is_restored(fails: bool) -> tuple[bool, bool]:
    before = patched()
    with contextlib.suppress(LookupError), pretend_device():
        changed = all(new is not old for new, old in zip(patched(), before, strict=True))
        if fails:
            raise LookupError
    after = patched()
    return changed, all(new is old for new, old in zip(after, before, strict=True))


def test_the_process_is_left_as_it_was(ranks: Ranks) -> None:
    assert ranks(1, is_restored, False) == [(True, True)]
    assert ranks(1, is_restored, True) == [(True, True)]


def waits_for_memory_of_the_host(device: str | torch.device) -> set[Kind]:
    """The kinds of findings after the host has read a number that lies there."""
    with pretend_device() as trace:
        number = torch.empty((), device=device)
        number.copy_(torch.frombuffer(bytearray(4), dtype=torch.float32)[0], non_blocking=True)
        assert not number.item()
    return {finding.kind for finding in trace.findings}


def test_memory_whose_device_is_spelled_cpu_is_the_host_s(ranks: Ranks) -> None:
    assert ranks(1, waits_for_memory_of_the_host, "cpu") == [set()]
    assert ranks(1, waits_for_memory_of_the_host, torch.device("cpu")) == [{Kind.SYNC}]


def test_no_module_keeps_a_function_that_is_patched() -> None:
    """A module that is first imported over the pretend device would keep its function for ever."""
    sources = Path(zeroshard.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if re.search(r"import .*\bhas_streams\b", path.read_text())] == []
