"""Train with zeroshard, and with plain PyTorch or DistributedDataParallel, on the same data."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import zeroshard
from tests.distributed.models import GPT, VOCABULARY, Llama
from zeroshard import Engine

ALL_STAGES = (0, 1, 2, 3)
"""For tests whose subject is the stages: parity, bytes at rest and on the wire."""
STAGES = ALL_STAGES if os.environ.get("ALL_STAGES") else (1, 3)
"""For the others: all with `--all`, and otherwise two that shard as much and as little as sharding can."""
SOME_STAGES = (1, 3) if os.environ.get("ALL_STAGES") else (3,)
"""For tests of what users do around steps: the one that shards most; with `--all` another one, too."""

Loss = Callable[[nn.Module, int], Tensor]
"""(model or engine, number of the step) -> this rank's loss."""

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "AdamW": lambda parameters: AdamW(parameters, lr=1e-3),
    "fused AdamW": lambda parameters: AdamW(parameters, lr=1e-3, fused=True),
    "SGD": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
}

Maker = str | Callable[[Iterable[nn.Parameter]], Optimizer]
"""A key of OPTIMIZERS, or what makes an optimizer over parameters."""


def build(kind: str, **sizes: int) -> nn.Module:
    """A model by the name of its architecture, the same on every rank; "tied ..." ties embedding and head."""
    torch.manual_seed(0)
    tied = kind.startswith("tied ")
    name = kind.removeprefix("tied ")
    make = {"GPT": GPT, "Llama": Llama, "transformers Llama": _transformers_llama}[name]
    model = make(tied=tied, **sizes)
    for module in model.modules():
        if isinstance(module, nn.Embedding):  # as language models do; logits of a tied head stay small
            nn.init.normal_(module.weight, std=0.02)
    return model


def seeded(make: Callable[..., Any], *arguments: Any, seed: int = 0, **options: Any) -> Any:
    """What a function makes with the random numbers of a seed, a model say: the same on every rank."""
    torch.manual_seed(seed)
    return make(*arguments, **options)


def small_gpt() -> nn.Module:
    """A tied GPT that is trained in little time; both ranks of two hold a part of its matrices."""
    return build("tied GPT", num_blocks=2, width=24)


def _transformers_llama(*, tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=84,
            intermediate_size=217,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            use_cache=False,
        )
    )


def tokens(step: int, *, rank: int | None = None) -> Tensor:
    """[2, 17], other ones for each rank and step."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randint(0, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(100 * step + rank))


def numbers(step: int, *shape: int, rank: int | None = None) -> Tensor:
    """Normal ones of any shape, other ones for each rank and step."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * step + rank))


def token_loss(model: nn.Module, step: int) -> Tensor:
    """Cross entropy of the next token."""
    batch = tokens(step)
    output = model(batch[:, :-1])
    logits = output["logits"] if isinstance(output, Mapping) else output
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def square_loss(model: nn.Module, step: int) -> Tensor:
    """For models from [n, 7]."""
    return model(numbers(step, 5, 7)).square().mean()


def own_loss(model: nn.Module, step: int) -> Tensor:
    """For models that are called with the number of a step."""
    return model(step)


def replicate(model: nn.Module, *, find_unused: bool = False) -> nn.Module:
    """What zeroshard must do the same as: a copy in DDP; on one rank, the plain copy."""
    model = copy.deepcopy(model)
    if dist.get_world_size() == 1:
        return model
    return DistributedDataParallel(model, find_unused_parameters=find_unused)


def plain(model: nn.Module) -> nn.Module:
    """The model inside DDP, or inside an engine."""
    return model.module if isinstance(model, DistributedDataParallel | Engine) else model


def made_by(optimizer: Maker, model: nn.Module) -> Optimizer:
    """An optimizer over the parameters of a model."""
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    return make(model.parameters())


def start(
    model: nn.Module, optimizer: Maker | Optimizer = "AdamW", **config: Any
) -> tuple[Engine, Optimizer]:
    """Shard the model; `optimizer` is one over its parameters, or what makes it."""
    if not isinstance(optimizer, Optimizer):
        optimizer = made_by(optimizer, model)
    engine, made, _, _ = zeroshard.initialize(model, optimizer, config)
    assert made is optimizer
    return engine, optimizer


def step(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> float:
    """One step of the plain loop, which works for DDP and for an engine."""
    value = loss(model, number)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    return value.item()


def take_steps(engine: Engine, numbers: Iterable[int], loss: Loss = square_loss) -> list[float]:
    """A backward and a step() of the engine for each number; returns the losses."""
    losses = []
    for number in numbers:
        value = loss(engine, number)
        engine.backward(value)
        engine.step()
        losses.append(value.item())
    return losses


def flat_values(engine: Engine) -> list[Tensor]:
    """The whole parameters, each with one dimension."""
    with engine.unsharded():
        return [parameter.detach().reshape(-1).clone() for parameter in engine.parameters()]


def values_after(engine: Engine, numbers: Iterable[int], loss: Loss) -> list[Tensor]:
    """The whole parameters after steps on the batches of these numbers."""
    take_steps(engine, numbers, loss)
    return flat_values(engine)


def part_of(engine: Engine, value: Tensor) -> Tensor:
    """The rows of a batch of all ranks that this data-parallel rank takes."""
    return value.chunk(engine.dp_world_size)[engine.dp_rank]


@dataclass
class Run:
    """What came of some steps."""

    losses: list[float]
    parameters: dict[str, Tensor]
    """The model's state_dict(); of a sharded model, empty on ranks other than 0."""


def train(model: nn.Module, optimizer: Optimizer, num_steps: int, loss: Loss = token_loss) -> Run:
    """Some steps of the plain loop."""
    return finish(model, [step(model, optimizer, loss, number) for number in range(num_steps)])


def finish(model: nn.Module, losses: list[float]) -> Run:
    """The end of a run: its parameters as they are now."""
    whole = model.full_state_dict() if isinstance(model, Engine) else plain(model).state_dict()
    return Run(losses, {name: value.clone() for name, value in whole.items()})


def train_replicated(
    model: nn.Module,
    optimizer: Maker,
    num_steps: int,
    loss: Loss = token_loss,
    *,
    averages: bool = False,
) -> Run:
    """The run of DDP, or on one rank of plain PyTorch, that starts from a model; it is left alone.

    With `averages` it is plain PyTorch with the mean of the ranks' gradients, for what DDP does not take.
    """
    if averages:
        replica = copy.deepcopy(model)
        made = made_by(optimizer, replica)
        return finish(replica, [averaged_step(replica, made, loss, number) for number in range(num_steps)])
    replica = replicate(model)
    return train(replica, made_by(optimizer, replica), num_steps, loss)


def train_sharded(
    model: nn.Module,
    optimizer: Maker,
    num_steps: int,
    loss: Loss = token_loss,
    *,
    methods: Iterable[str] = (),
    **config: Any,
) -> Run:
    """The run of zeroshard that starts from a model; it is left alone. `methods` are registered."""
    engine, made = start(copy.deepcopy(model), optimizer, **config)
    for method in methods:
        engine.register_forward_method(method)
    return train(engine, made, num_steps, loss)


def by_hand(
    model: nn.Module,
    optimizer: str,
    numbers: Iterable[int],
    loss: Loss,
    compute_dtype: torch.dtype,
    *,
    reduce_dtype: torch.dtype = torch.float32,
    loss_scale: float = 1.0,
) -> Run:
    """Plain PyTorch: forward and backward in `compute_dtype`; mean of the gradients and step in fp32."""
    compute = copy.deepcopy(model)
    for parameter in compute.parameters():
        parameter.data = parameter.data.to(compute_dtype)
    given = dict(model.named_parameters())
    main = {name: nn.Parameter(given[name].detach().clone()) for name, _ in compute.named_parameters()}
    made, losses, n = OPTIMIZERS[optimizer](main.values()), [], dist.get_world_size()
    for number in numbers:
        value = loss(compute, number)
        (value * loss_scale).backward()
        losses.append(value.item())
        for name, parameter in compute.named_parameters():
            if not parameter.requires_grad:
                continue
            mine = parameter.grad.to(reduce_dtype) / n
            parts = [torch.empty_like(mine) for _ in range(n)]
            dist.all_gather(parts, mine.contiguous())
            main[name].grad = torch.stack(parts).float().sum(0) / loss_scale
        made.step()
        compute.zero_grad()
        with torch.no_grad():
            for name, parameter in compute.named_parameters():
                parameter.copy_(main[name])
    return Run(losses, {name: value.detach().clone() for name, value in main.items()})


def only(run: Run, names: Iterable[str]) -> Run:
    """Without tied names and buffers."""
    return Run(run.losses, {name: run.parameters[name] for name in names if run.parameters})


def differences(what: str, got: Run, want: Run) -> list[str]:
    """Where two runs differ by a single bit. Parameters are compared on rank 0, losses everywhere."""
    found = [
        f"{what}: loss {number} is {a!r}, not {b!r}"
        for number, (a, b) in enumerate(zip(got.losses, want.losses, strict=True))
        if a != b
    ]
    if dist.get_rank() == 0 and got.parameters.keys() != want.parameters.keys():
        found.append(f"{what}: names {got.parameters.keys() ^ want.parameters.keys()}")
    found += [
        f"{what}: {name} differs by {(value - want.parameters[name]).abs().max().item():g}"
        for name, value in got.parameters.items()
        if name in want.parameters and not torch.equal(value, want.parameters[name])
    ]
    return found[:4]


def same_as_replicated(
    model: nn.Module,
    optimizer: Maker = "AdamW",
    num_steps: int = 4,
    loss: Loss = token_loss,
    *,
    stages: Iterable[int] = STAGES,
    averages: bool = False,
    **config: Any,
) -> list[str]:
    """Where zeroshard's run differs from DDP's by a single bit; `averages` as in `train_replicated`."""
    want = train_replicated(model, optimizer, num_steps, loss, averages=averages)
    found = []
    for stage in stages:
        got = train_sharded(model, optimizer, num_steps, loss, stage=stage, **config)
        found += differences(f"stage {stage}", got, want)
    return found


def full_gradients(engine: Engine) -> dict[str, Tensor]:
    """The gradients of all ranks put together, flat, by name; without those that are None."""
    own = {name: p.grad.clone() for name, p in engine.named_parameters() if p.grad is not None}
    if engine.config.stage == 0:
        return own
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {name: torch.cat([slices[name] for slices in everyone]) for name in own}


def flat_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of a plain or DDP model, as `full_gradients` gives them."""
    return {
        name: p.grad.flatten().clone() for name, p in plain(model).named_parameters() if p.grad is not None
    }


def distances(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """By name, the norm of the difference relative to the norm."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    return {name: _distance(value, want[name]) for name, value in got.items()}


def distance_of_all(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """The norm of the difference of all tensors together relative to their norm."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    pairs = [(got[name].flatten(), want[name].flatten()) for name in got]
    return _distance(torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs]))


def _distance(got: Tensor, want: Tensor) -> float:
    difference = (got.double() - want.double()).norm()
    return (difference / want.double().norm()).item() if difference else 0.0


def farthest(got: Iterable[Tensor], want: Iterable[Tensor]) -> float:
    """The largest difference of two elements."""
    return max((a - b).abs().max().item() for a, b in zip(got, want, strict=True))


def padded_size(engine: Engine) -> int:
    """P of the formulas: elements of all units, padding included."""
    return sum(unit.numel for unit in engine.units)


def different(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> list[str]:
    """Names under which two mappings do not hold the same bits, also those that only one of them has."""
    both = got.keys() & want.keys()
    same = {n for n in both if got[n].dtype == want[n].dtype and torch.equal(got[n], want[n])}
    return sorted((got.keys() | want.keys()) - same)


def unequal(what: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> Iterator[str]:
    """How two mappings differ under the names of `different`."""
    for name in different(got, want):
        if name not in got or name not in want:
            yield f"{what}: {name} is only in one"
        else:
            yield f"{what}: {name} differs by {(got[name] - want[name]).abs().max().item():g}"


def live_bytes(messages=True):
    """Of every tensor made since the last gc.freeze(), each storage once.

    Without `messages`, tensors of uint8 do not count: those of the ranks come and go in the background.
    """
    gc.collect()
    storages = {}
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            if isinstance(thing, torch.Tensor) and (messages or thing.dtype != torch.uint8):
                with contextlib.suppress(RuntimeError, NotImplementedError):  # fake and meta tensors
                    storage = thing.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class SendCounter:
    """Elements that process groups send while it is their method `send`, as in exchanges of CPU ranks."""

    def __init__(self):
        self.elements, self._send = 0, dist.ProcessGroup.send

    def __get__(self, group, owner):
        return self if group is None else partial(self, group)

    def __call__(self, group, tensors, *args):
        self.elements += sum(tensor.numel() for tensor in tensors)
        return self._send(group, tensors, *args)


def micro_batches(engine, k):
    def take_step(number):
        for micro in range(k):
            engine.backward(token_loss(engine, k * number + micro))
            engine.step()

    return take_step


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.3)


def averaged_step(model, optimizer, loss, number):
    """A step of plain PyTorch with the mean of the ranks' gradients."""
    value = loss(model, number)
    value.backward()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient *= 1 / dist.get_world_size()
        dist.all_reduce(gradient)
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    return value.item()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def unlike(what, got, want):
    got, want = (value if isinstance(value, tuple) else (value,) for value in (got, want))
    same = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))
    return [] if same else [f"{what} gives {got}, not {want}"]


def apart(what, got, want):
    """Where two runs differ by more than the order of sums."""
    found = unlike(f"{what}, losses", torch.tensor(got.losses), torch.tensor(want.losses))
    for name, value in got.parameters.items():
        found += unlike(f"{what}, {name}", value, want.parameters[name])
    return found


def lora(dtype=torch.float32, *, checkpoints=False, **options):
    """Adapters, with random values in both halves, on a small Llama; the rest is frozen.

    Args:
        dtype: of what is frozen; adapters stay in fp32.
        checkpoints: whether there are activation checkpoints.
        options: of peft.
    """
    import peft

    base = build("tied transformers Llama").to(dtype)
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **options,
    )
    if checkpoints:
        base.gradient_checkpointing_enable()
        base.enable_input_require_grads()
    model = peft.get_peft_model(base, config)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    return model.train()


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The message of the ValueError or RuntimeError that a call must raise."""
    with pytest.raises((ValueError, RuntimeError), match=r"\w") as raised:
        call(*args, **kwargs)
    return str(raised.value)


def caught(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The type's name and the message of what a call raises."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
