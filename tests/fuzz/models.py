"""A random small model and its data, from a random number generator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.fuzz import blocks
from tests.fuzz.blocks import Residual, call

VOCABULARY = 37
INPUTS = ("tokens", "vectors", "images")
LENGTH = 9


@dataclass
class Output:
    """What some models return; dataclasses hide their tensors from pytree."""

    prediction: Tensor
    extra: Any = None


class Pair(NamedTuple):
    prediction: Tensor
    states: Tensor


class Net(nn.Module):
    """A stem, blocks, a head; parameters of its own, one of which nobody uses.

    Args:
        kind: of the inputs, one of INPUTS.
        returns: "tensor", "dict", "tuple" or "dataclass".
    """

    def __init__(self, kind: str, width: int, body: list[nn.Module], num_outputs: int, returns: str) -> None:
        super().__init__()
        self.kind, self.returns, self.dtype = kind, returns, torch.float32
        self.stem = {
            "tokens": lambda: nn.Embedding(VOCABULARY, width),
            "vectors": lambda: nn.Linear(5, width),
            "images": lambda: nn.Conv2d(2, width, 3, padding=1),
        }[kind]()
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(body)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_outputs, bias=False)
        self.offset, self.unused = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(2, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: Tensor, *, called: tuple[int, ...], cut: tuple[int, ...] = ()) -> Any:
        """Call the blocks `called`; those at the places `cut` of this list have no backward on this rank."""
        x = self.stem(inputs.to(self.dtype) if inputs.is_floating_point() else inputs)
        x = (x.flatten(2).transpose(1, 2) if self.kind == "images" else x) + self.positions
        if self.training:
            self.calls += 1
        for place, number in enumerate(called):
            y = call(self.blocks[number], x)
            # Either the block alone is left out of the graph, or everything before it as well.
            x = y if place not in cut else y.detach() if place % 2 else x + (y - x).detach()
        prediction = self.head(self.norm(x)) + self.offset
        match self.returns:
            case "dict":
                return {"states": [x], "prediction": prediction}
            case "tuple":
                return Pair(prediction, x)
            case "dataclass":
                return Output(prediction)
        return prediction


def prediction_of(output: Any) -> Tensor:
    """The prediction in what a Net returns."""
    if isinstance(output, Tensor):
        return output
    return output["prediction"] if isinstance(output, dict) else output.prediction


def random_inputs(kind: str, size: int, generator: torch.Generator) -> Tensor:
    """A batch for a Net."""
    if kind == "tokens":
        return torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator)
    shape = (LENGTH, 5) if kind == "vectors" else (2, 3, 3)
    return torch.randn(size, *shape, generator=generator)


# -- composition -----------------------------------------------------------------------------------------


def random_model(random: Random, *, recomputes: bool) -> Net:
    """Structure from `random`, values from torch's default generator.

    Args:
        recomputes: whether units are recomputed: running statistics inside two checkpoints depend on how
            often each of them runs the forward.
    """
    width, kind = random.choice((4, 6, 8, 12, 20, 32)), random.choice(INPUTS)
    make = _maker(random, width, recomputes)
    repeated = random.random() < 0.5
    body = _repeat(random, make) if repeated else [make(2) for _ in range(random.randint(0, 4))]
    if body and random.random() < 0.15:
        body.append(random.choice(body))  # the same block in two places
    is_tied = kind == "tokens" and random.random() < 0.4
    num_outputs = VOCABULARY if is_tied else random.choice((1, 3, 5))
    model = Net(kind, width, body, num_outputs, random.choice(("tensor", "dict", "tuple", "dataclass")))
    if kind == "tokens":
        nn.init.normal_(model.stem.weight, std=0.3)
    if is_tied:
        model.head.weight = model.stem.weight
    if random.random() < 0.25:
        _share(random, model)
    _choose_dtypes(random, model)
    if random.random() < 0.3:
        _freeze(random, model)
    return model


def _maker(random: Random, width: int, recomputes: bool) -> Callable[[int], nn.Module]:
    """(depth of nesting allowed) -> a random block."""
    heads = 2

    def mlp() -> nn.Module:
        return blocks.Mlp(
            width,
            random.choice((1, 7, 16, 30)),
            bias=random.random() < 0.7,
            dropout=random.choice((0.0, 0.0, 0.3)),
            unused=random.random() < 0.2,
        )

    plain = (
        mlp,
        mlp,
        lambda: blocks.Attention(width, heads, LENGTH),
        lambda: blocks.TorchAttention(width, heads),
        lambda: blocks.Recurrent(width),
        lambda: blocks.Scale(width),
        lambda: blocks.Experts(width, random.randint(2, 4)),
        lambda: blocks.Conv(width, random.choice((1, 3))),  # the last, as it has running statistics
    )

    def make(depth: int) -> nn.Module:
        if not depth or random.random() < 0.5:
            return random.choice(plain)()
        wrap = random.choice(
            (
                lambda: blocks.Gate(random.choice(plain)(), cuts=random.random() < 0.3),
                lambda: blocks.Nested([make(depth - 1) for _ in range(random.randint(1, 3))]),
                lambda: blocks.Checkpointed(random.choice(plain[:-1] if recomputes else plain)()),
                lambda: blocks.KeywordOnly(make(depth - 1)),
            )
        )
        return wrap()

    return make


def _repeat(random: Random, make: Callable[[int], nn.Module]) -> list[nn.Module]:
    """As in a language model: the same block several times, other weights in each."""
    state = random.getstate()
    body = []
    for _ in range(random.randint(2, 4)):
        random.setstate(state)
        body.append(make(2))
    return body


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                yield module, name, child


def _share(random: Random, model: Net) -> None:
    """Tie weights of two layers of the same shape, or put one layer in both places."""
    places = list(_places(model.blocks))
    pairs = [
        (one, other)
        for one in places
        for other in places
        if one[2] is not other[2]
        and one[2].weight.shape == other[2].weight.shape
        and (one[2].bias is None) == (other[2].bias is None)
    ]
    for _ in range(min(len(pairs), random.randint(1, 2))):
        (_, _, first), (owner, name, second) = random.choice(pairs)
        if random.random() < 0.5:
            second.weight = first.weight
        else:
            setattr(owner, name, first)


def _num_places(model: Net) -> Counter[nn.Parameter]:
    """By parameter, how many names it has."""
    return Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))


def _choose_dtypes(random: Random, model: Net) -> None:
    """One for the model and sometimes another for a block that shares no parameter."""
    dtype = random.choice((*[torch.float32] * 5, torch.bfloat16, torch.float64))
    _cast(model, dtype)
    model.dtype = dtype
    num_places = _num_places(model)
    for block in model.blocks:
        if random.random() < 0.15 and all(num_places[parameter] == 1 for parameter in block.parameters()):
            _cast(block, random.choice((torch.float32, torch.bfloat16, torch.float64)))


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters, not buffers."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        if isinstance(module, Residual):
            module.dtype = dtype


def compute_in(model: Net, dtype: torch.dtype) -> None:
    """Tell the blocks that all parameters will be in `dtype` inside their forward."""
    for module in model.modules():
        if isinstance(module, Residual | Net):
            module.dtype = dtype


def _freeze(random: Random, model: Net) -> None:
    """At random, or all but a few; the head's offset is trained, so that there is a backward."""
    part = random.choice((0.2, 0.9, 1.0))
    for parameter in model.parameters():
        parameter.requires_grad_(random.random() >= part)
    model.offset.requires_grad_(True)


def unconditional(model: Net) -> list[nn.Module]:
    """Modules that run on all ranks or on none, inside the root: those that may be units."""
    conditional = {
        part
        for module in model.modules()
        if isinstance(module, blocks.Gate | blocks.Experts)
        for part in module.modules()
        if part is not module
    }
    read_from_outside = {
        m.attention.out_proj for m in model.modules() if isinstance(m, blocks.TorchAttention)
    }
    never = conditional | read_from_outside | {model}
    return [m for m in model.modules() if m not in never and not isinstance(m, nn.ModuleList)]
