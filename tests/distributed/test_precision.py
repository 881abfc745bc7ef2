"""bf16 compute with fp32 main parameters, against the same written by hand in plain PyTorch."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.training import (
    SOME_STAGES,
    build,
    full_gradients,
    numbers,
    start,
    token_loss,
    unequal,
)
from tests.ranks import on_ranks

BF16 = {"param_dtype": "bf16"}


# ------------------------------------------------------------------------------------------------ dtypes


class Probe(nn.Module):
    """Notes the dtypes that its forward sees."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.full((7,), 1 / 3))
        self.seen = {}

    def forward(self, x, mask, *, options):
        self.seen = {
            "x": x.dtype,
            "mask": mask.dtype,
            "option": options["scale"].dtype,
            "gain": self.gain.dtype,
            "table": self.table.dtype,
        }
        for block in self.blocks:
            x = block(x) * self.gain
        return {"x": x * options["scale"], "mask": mask, "list": [x.sum()]}


HALF, WIDE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("precision", "inside", "outside"),
    [(BF16, HALF, HALF), (BF16 | {"output_dtype": "fp32"}, HALF, WIDE), ({}, None, WIDE)],
)
@on_ranks(2)
def test_float_inputs_and_outputs_are_cast_and_buffers_and_main_parameters_are_not(
    precision, inside, outside
):
    for stage in SOME_STAGES:
        torch.manual_seed(0)
        model = Probe()
        engine, optimizer = start(model, stage=stage, precision=precision)
        x, mask = numbers(0, 5, 7), torch.ones(5, dtype=torch.bool)
        out = engine(x, mask, options={"scale": torch.tensor(2.0, dtype=torch.float64)})
        out["x"].float().square().mean().backward()
        assert model.seen == {
            "x": inside or WIDE,
            "mask": torch.bool,
            "option": inside or torch.float64,
            "gain": inside or WIDE,
            "table": WIDE,
        }
        assert (out["x"].dtype, out["mask"].dtype, out["list"][0].dtype) == (outside, torch.bool, outside)
        kept = {p.grad.dtype for p in engine.parameters()}
        optimizer.step()
        kept |= {v.dtype for state in optimizer.state.values() for v in state.values() if v.numel() > 1}
        kept |= {p.dtype for p in engine.parameters()} | {v.dtype for v in engine.full_state_dict().values()}
        assert kept == {WIDE}
        assert torch.equal(model.table, torch.full((7,), 1 / 3))


# ------------------------------------------------------------------------------------ models of other dtypes


@on_ranks(2)
def test_micro_batches_are_added_in_fp32_and_rounded_once_on_the_wire():
    compute = build("tied GPT")
    engine, _ = start(copy.deepcopy(compute), stage=1, precision={**BF16, "reduce_dtype": "bf16"})
    sums = {}
    for parameter in compute.parameters():
        parameter.data = parameter.data.bfloat16()
    for number in range(4):
        with engine.no_sync():
            token_loss(engine, number).backward()
        token_loss(compute, number).backward()
        for name, parameter in compute.named_parameters():
            sums[name] = sums.get(name, 0.0) + parameter.grad.float().flatten()
        compute.zero_grad()
    engine.clip_grad_norm_(1e9)  # reduces what was added up
    found = full_gradients(engine)
    for name, total in sums.items():
        parts = [torch.empty_like(total, dtype=torch.bfloat16) for _ in range(2)]
        dist.all_gather(parts, (total / 2).bfloat16())
        sums[name] = parts[0].float() + parts[1].float()
    return list(unequal("gradients", found, sums))


@on_ranks(2)
def test_a_batch_norm_that_is_a_unit_gets_its_inputs_as_they_are():
    model = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7))
    engine, _ = start(model, "SGD", stage=3, units=["BatchNorm1d"], precision={"param_dtype": "bfloat16"})
    seen = []
    engine.module[0].register_forward_hook(lambda module, args, output: output.float())
    engine.module[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    engine(torch.ones(5, 7))
    assert seen == [torch.float32]
