"""The engines compared: a table from a name to a builder of that engine's training step.

Each starts from the same weights and uses AdamW with torch's fused kernel; DeepSpeed is there with and
without it. In bf16, zeroshard, FSDP2 and DeepSpeed compute in bf16 over fp32 main parameters. Plain PyTorch,
DDP and torch's ZeroRedundancyOptimizer have no main parameters and run under autocast.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from before import is_there, load
from model import GPT, Shape, add_shape_arguments, build_model, next_token_loss

Step = Callable[[Tensor], Tensor]
"""(batch, sequence + 1) tokens -> this rank's loss, after a whole optimizer step."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The setting that all engines of a run share."""

    shape: Shape
    """Sizes of the model."""
    batch: int
    """Sequences per rank and step."""
    precision: str
    """"fp32" or "bf16"."""
    device: torch.device
    """The device of this rank."""

    @property
    def bf16(self) -> bool:
        """True if engines compute in bf16."""
        return self.precision == "bf16"

    def model(self) -> GPT:
        """The common initial weights, on the device, in fp32."""
        return build_model(self.shape, self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """The autocast context of engines without fp32 main parameters of their own."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()


def adamw(parameters: Iterable[Tensor], *, fused: bool = True) -> torch.optim.AdamW:
    """The optimizer of every engine; `fused=False` leaves the kernel to torch's defaults."""
    return torch.optim.AdamW(parameters, lr=3e-4, fused=fused or None)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """The loss of the next tokens of the GPT."""
    return next_token_loss(model(tokens[:, :-1]), tokens)


def torch_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    context: AbstractContextManager[Any] | None = None,
    loss_of: Callable[[Any, Tensor], Tensor] = loss_of,
) -> Step:
    """The training step as PyTorch users write it; forwards run inside of `context`."""

    def step(tokens: Tensor) -> Tensor:
        with context or nullcontext():
            loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain(setting: Setting) -> Step:
    """Plain PyTorch, every rank alone: the cost of the arithmetic without communication."""
    model = setting.model()
    return torch_step(model, adamw(model.parameters()), setting.autocast())


def plain_main(setting: Setting) -> Step:
    """Plain PyTorch, every rank alone: a bf16 model with fp32 main parameters, kept by hand."""
    model = setting.model()
    mains: list[Tensor] = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = adamw(mains)
    model = model.to(torch.bfloat16)
    parameters: list[Tensor] = list(model.parameters())

    def step(tokens: Tensor) -> Tensor:
        loss = next_token_loss(model(tokens[:, :-1]), tokens)
        loss.backward()
        for main, parameter in zip(mains, parameters, strict=True):
            main.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, mains)
        optimizer.zero_grad()
        return loss.detach()

    return step


def _ddp_model(setting: Setting) -> nn.Module:
    device_ids = [setting.device.index] if setting.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(setting.model(), device_ids=device_ids)


def ddp(setting: Setting) -> Step:
    """torch DistributedDataParallel."""
    model = _ddp_model(setting)
    return torch_step(model, adamw(model.parameters()), setting.autocast())


def torch_zero1(setting: Setting) -> Step:
    """torch ZeroRedundancyOptimizer over DistributedDataParallel."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = _ddp_model(setting)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, fused=True)
    return torch_step(model, optimizer, setting.autocast())


def fsdp2_parts(setting: Setting, *, reshard: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """torch `fully_shard` of every block and of the root, as its tutorial does, and its optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(setting.device.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if setting.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = setting.model()
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, adamw(model.parameters())


def fsdp2(setting: Setting, *, reshard: bool) -> Step:
    """torch `fully_shard`."""
    return torch_step(*fsdp2_parts(setting, reshard=reshard))


def deepspeed(setting: Setting, *, stage: int, fused: bool) -> Step:
    """DeepSpeed ZeRO over torch's AdamW (its own CPU kernel needs a compiler), without clipping."""
    if setting.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported
    import deepspeed as ds

    config = {
        "train_micro_batch_size_per_gpu": setting.batch,
        "gradient_accumulation_steps": 1,
        # By default, stage 3 puts its own function in the place of F.linear, for all engines of the process.
        "zero_optimization": {"stage": stage, "memory_efficient_linear": False},
        "gradient_clipping": 0.0,  # its default is 1.0; the others do not clip
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": setting.bf16},
        "steps_per_print": 10**9,
    }
    model = setting.model()
    optimizer = adamw(model.parameters(), fused=fused)
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config)
    return engine_step(engine)


def zeroshard_engine(setting: Setting, *, stage: int, package: Any = None) -> Any:
    """An engine of zeroshard, or of the package of another commit, with its defaults."""
    import zeroshard as zs  # here, so that the peak RSS of other engines is without it

    config = {"stage": stage, "precision": {"param_dtype": "bfloat16"} if setting.bf16 else {}}
    model = setting.model()
    return (package or zs).initialize(model, adamw(model.parameters()), config=config).engine


def engine_step(engine: Any, loss_of: Callable[[Any, Tensor], Tensor] = loss_of) -> Step:
    """The training step with the calls of zeroshard and DeepSpeed."""

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def before(setting: Setting, *, stage: int) -> Step:
    """The zeroshard of the commit that --before gives."""
    return engine_step(zeroshard_engine(setting, stage=stage, package=load()))


def zeroshard(setting: Setting, *, stage: int) -> Step:
    """zeroshard with its defaults."""
    return engine_step(zeroshard_engine(setting, stage=stage))


Build = Callable[[Setting], Step]
STAGES, ALL = (1, 2, 3), (0, 1, 2, 3)
_TABLE: dict[str, tuple[str, Build]] = {
    "plain": ("plain PyTorch, no communication", plain),
    "plain-main": ("plain PyTorch with fp32 main parameters, no communication", plain_main),
    "ddp": ("DistributedDataParallel", ddp),
    "torch-zero1": ("torch ZeroRedundancyOptimizer (stage 1)", torch_zero1),
    "fsdp2": ("FSDP2 fully_shard", partial(fsdp2, reshard=True)),
    "fsdp2-keep": ("FSDP2 without reshard after forward (stage 2)", partial(fsdp2, reshard=False)),
    **{f"deepspeed-{n}": (f"DeepSpeed stage {n}", partial(deepspeed, stage=n, fused=False)) for n in STAGES},
    **{
        f"deepspeed-fused-{n}": (f"DeepSpeed stage {n}, fused AdamW", partial(deepspeed, stage=n, fused=True))
        for n in STAGES
    },
    **{f"zeroshard-{n}": (f"zeroshard stage {n}", partial(zeroshard, stage=n)) for n in ALL},
    **{f"before-{n}": (f"zeroshard stage {n} of an earlier commit", partial(before, stage=n)) for n in ALL},
}
LABELS = {name: label for name, (label, _) in _TABLE.items()}
ENGINES = {name: build for name, (_, build) in _TABLE.items()}


def why_not(name: str, precision: str) -> str | None:
    """The reason why an engine can't be part of a run, or None if it can."""
    if name.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed"
    if name.startswith("before") and not is_there():
        return "no commit was given with --before"
    if name == "plain-main" and precision != "bf16":
        return "fp32 has no separate main parameters"
    return None


def parse_with_engines(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse a command line that also has the engines, their precision and the sizes of the model."""
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--engines", help=f"comma-separated, of {', '.join(ENGINES)}; default all")
    add_shape_arguments(parser)
    args = parser.parse_args(arguments)
    try:
        select(args.engines, args.precision)
    except ValueError as error:
        parser.error(str(error))
    return args


def select(requested: str | None, precision: str) -> tuple[list[str], dict[str, str]]:
    """The engines to run, of a comma-separated list or all, and the reason for each left out.

    Raises:
        ValueError: for a name that isn't in `ENGINES`.
    """
    names = list(ENGINES) if requested is None else requested.split(",")
    unknown = [name for name in names if name not in ENGINES]
    if unknown:
        raise ValueError(f"Expected engines among {', '.join(ENGINES)}, got {', '.join(unknown)}")
    reasons = {name: why_not(name, precision) for name in names}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    return [name for name in names if name not in skipped], skipped
