"""The layers of a plan, and the parts of their parameters that the ranks of a tensor group hold.

A model whose user gives no plan has the plan of transformers. Nothing is changed and no
rank is asked: a plan that does not fit a model is an error before anything starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from zeroshard.parallel.pipeline.chunked import HOOKS, Absent
from zeroshard.parallel.tensor.losses import with_loss
from zeroshard.parallel.tensor.sequence import check_coverage, with_sequence
from zeroshard.parallel.tensor.styles import (
    BY_ROWS,
    OF_SEQUENCE,
    WITHOUT_CUTS,
    Divided,
    LayerPlan,
    Plan,
    Split,
    cuts_of_experts,
    named_by,
    with_heads,
)
from zeroshard.plan.cuts import Cut
from zeroshard.plan.originals import Original, is_packed
from zeroshard.plan.placement import SUMMANDS, SUMMANDS_OF_PARTS
from zeroshard.plan.units import UnitSpec

_BESIDE = {
    "phi": {"*self_attn.[qk]_layernorm": "replicated_with_grad_allreduce"},
    "apertus": {"*mlp.act_fn": "replicated_with_grad_allreduce"},
}
"""Entries that the plans of transformers lack, by `config.model_type`. A rank uses these layers for its own
heads or hidden elements."""


def plan_of(model: nn.Module) -> Mapping[str, str]:
    """Return the plan of a model, {} if there is none.

    A plan serves several variants of a model. The patterns that fit nothing in this one are left out.
    """
    kind = str(getattr(getattr(model, "config", None), "model_type", None))
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    plan |= _BESIDE.get(kind, {}) if plan else {}
    names = [*dict(model.named_modules()), *dict(model.named_parameters(remove_duplicate=False))]
    # A key is a full name, so "lm_head" means no "language_model.lm_head".
    plan = {at: word for at, word in plan.items() if any(fnmatchcase(name, at) for name in names)}
    return plan | _with_tied_embeddings(model, plan)


def _with_tied_embeddings(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Entries for embeddings that the plan leaves out, and whose table is the weight of a divided layer."""
    weights = {name: module._parameters.get("weight") for name, module in model.named_modules()}
    divided = named_by(plan, model)
    tables = {weights.get(name) for name in divided} - {None}
    return {
        name: "rowwise"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name not in divided and weights[name] in tables
    }


_WHOLE = LayerPlan(Split.REPLICATE)
_TORCH = ("torch.nn.modules.linear", "torch.nn.modules.sparse")
"""The Python modules whose forwards compute parts of outputs with parts of weights."""


def match(model: nn.Module, plan: Plan, num_ranks: int) -> list[Divided]:
    """Find the layers of a plan and the parts of their parameters; nothing is changed.

    Args:
        model: the model.
        plan: styles by pattern, see `plan/names.py`; the first one that fits a module holds.
        num_ranks: the ranks of a tensor group.

    Raises:
        ValueError: a pattern fits no module, a module cannot be divided that way, or the ranks do not divide
            it.
    """
    styles = {pattern: LayerPlan.of(style, pattern) for pattern, style in plan.items()}
    fits, found, used = {pattern: named_by([pattern], model) for pattern in styles}, [], set()

    def style_of(name: str) -> LayerPlan:
        patterns = [pattern for pattern in styles if name in fits[pattern]]
        used.update(patterns)
        return styles[patterns[0]] if patterns else _WHOLE

    for name, module in model.named_modules():
        style = style_of(name)
        if style.way is not Split.REPLICATE and not isinstance(module, Absent):
            parent = model.get_submodule(name.rpartition(".")[0])
            style = with_heads(style, name, module, parent, num_ranks)
            if style.way is Split.EXPERTS:
                words = {at: style_of(f"{name}.{at}").way.value for at, _ in module.named_parameters()}
                cuts = cuts_of_experts(name, module, words, num_ranks)
            else:
                cuts = {} if style.way in WITHOUT_CUTS else dict(_cuts(name, module, style, num_ranks))
            found.append(Divided(name, module, style, cuts, parent))
            _refuse_own_code(found[-1])
    for pattern in styles.keys() - used:
        raise ValueError(f"tp_plan: no module of the model is called '{pattern}'")
    return found


def _refuse_own_code(layer: Divided) -> None:
    """Refuse forwards and hooks of the user: such a forward would not run, such a hook would see parts."""
    module, way, name = layer.module, layer.style.way, layer.name
    is_table = isinstance(module, nn.Embedding)
    is_product = way in BY_ROWS and not is_table  # F.linear in place of a forward
    known: tuple[str, ...] = (*_TORCH, "transformers.")
    if is_product or way is Split.SHARED_COLUMNS:
        known = _TORCH
    elif way is Split.EXPERTS:
        known = ("",)
    sees_wholes = way is Split.SEQUENCE_SPLIT or (way is Split.ROWS and is_table)
    # A patch by functools.wraps has the __module__ of what it wraps, but the globals of its own.
    origin = type(module).forward.__globals__["__name__"]
    is_other = "forward" in vars(module) or not origin.startswith(known)
    if is_other and layer.has_other_forward:
        what = "a forward of its own"
    elif not sees_wholes and any(getattr(module, kind) for kind in HOOKS):
        what = "hooks"
    else:
        return
    remedy = (
        "Set mesh.sequence=False"
        if way in OF_SEQUENCE
        else f"Put '{name}': 'replicate' first in tp_plan, and the same for the layers that share its "
        "values, such as all of an attention, all of an MLP, or both of two tied weights"
    )
    raise ValueError(
        f"tp_plan: '{name}' is a {type(module).__name__} with {what}, which would get a part of the weight "
        "or of the values on each tensor rank; expected a Linear, an Embedding or a layer of transformers "
        f"as it is. {remedy}"
    )


@dataclass(frozen=True, slots=True)
class Division:
    """A model whose layers are to be divided."""

    layers: list[Divided]
    specs: list[UnitSpec]
    """The units, with the cuts of their parameters."""


def plan_division(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    plan: Plan | None,
    num_ranks: int,
    *,
    by_sequence: bool = False,
) -> Division:
    """Find how to divide the layers of a model.

    Args:
        model: the model.
        specs: its units.
        plan: see `match`; None for a plan that is known.
        num_ranks: the ranks of a tensor group.
        by_sequence: True adds entries for the norms of a model of transformers.

    Raises:
        ValueError: see `match`; there is no plan; a weight is quantized, or has an adapter; or a parameter
            that two layers share would be cut in two ways.
    """
    _check_words(plan)
    if num_ranks == 1:
        return Division([], list(specs))
    _refuse_codes(specs)
    if any(getattr(module, "peft_config", None) for module in model.modules()):
        raise ValueError(
            f"mesh.tp={num_ranks}: {type(model).__name__} has adapters of peft, which tensor ranks do not "
            "divide: expected mesh.tp=1. Stage 3 shards frozen weights, too"
        )
    is_known = plan is None
    plan = plan_of(model) if plan is None else plan
    if not plan:
        raise ValueError(
            f"mesh.tp={num_ranks}: {type(model).__name__} has no plan of its own, as many models of "
            "transformers have in `tp_plan`: give tp_plan={'layers.*.up': 'colwise', "
            "'layers.*.down': 'rowwise', ...}; layers of Conv1D (GPT-2) cannot be divided"
        )
    along_sequence = any(LayerPlan.of(style, at).way in OF_SEQUENCE for at, style in plan.items())
    if by_sequence and not along_sequence:
        plan, along_sequence = with_sequence(model, plan), True
    layers = match(model, plan, num_ranks)
    if is_known:
        layers = [with_loss(layer, model) for layer in layers]
    else:
        _refuse_counted_heads(layers)
    cuts = _cuts_of(layers)
    _refuse_whole_ties(model, layers, cuts)
    summed = {p for layer in layers if layer.is_summed for p in layer.module.parameters()}
    if along_sequence:
        for layer in layers:
            if layer.style.way is Split.EXPERTS:  # its sums are not split
                raise ValueError(
                    f"tp_plan: '{layer.name}' is 'moe_tp_experts'; expected none with 'sequence'"
                )
        check_coverage(model, plan)
        biases = (layer.module._parameters.get("bias") for layer in layers if layer.style.way in BY_ROWS)
        summed.update(bias for bias in biases if bias is not None)  # they are added to parts of a sequence
    _refuse_ignored(model, specs, cuts, summed)

    def noted(o: Original) -> Original:
        summands = SUMMANDS_OF_PARTS if o.parameter in summed else SUMMANDS
        return replace(o, cut=cuts.get(o.parameter), summands=summands)

    return Division(layers, [replace(spec, originals=[noted(o) for o in spec.originals]) for spec in specs])


def _refuse_codes(specs: Sequence[UnitSpec]) -> None:
    """Refuse codes: their blocks go over the borders of rows and columns."""
    for original in (original for spec in specs for original in spec.originals):
        if is_packed(original.parameter):
            raise ValueError(
                f"'{original.fqn}' holds codes of a quantized weight, which tensor ranks cannot divide: "
                "expected mesh.tp=1, or a model that is not quantized"
            )


def _check_words(plan: Plan | None) -> None:
    """Refuse a plan of another form, also where there is one tensor rank and it is not needed."""
    given: object = plan
    if plan is not None and not (isinstance(given, Mapping) and plan):
        raise ValueError(
            f"tp_plan: expected words by pattern, {{'layers.*.up': 'colwise', ...}}, got {plan!r}"
        )
    for pattern, word in (plan or {}).items():
        LayerPlan.of(word, pattern)


def _cuts_of(layers: Sequence[Divided]) -> dict[nn.Parameter, Cut]:
    """The cut of each parameter that is divided."""
    cuts: dict[nn.Parameter, Cut] = {}
    for layer in layers:
        for attribute, cut in layer.cuts.items():
            parameter = layer.module._parameters[attribute]
            assert parameter is not None, "it has a cut"
            other = cuts.setdefault(parameter, cut)
            if (other.dim, other.sections) != (cut.dim, cut.sections):
                raise ValueError(f"tp_plan: '{cut.name}' is tied to '{other.name}', which is cut another way")
    return cuts


_COUNTS_OF_HEADS = ("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads")


def _refuse_counted_heads(layers: Sequence[Divided]) -> None:
    """Refuse layers of attention that may view the part of a rank as all heads, each of fewer elements.

    No error would say so: the values would be the values of another model.
    """
    for layer in layers:
        counts = {at: getattr(layer.parent, at, None) for at in _COUNTS_OF_HEADS}
        found = next((at for at, number in counts.items() if isinstance(number, int) and number > 1), None)
        if layer.style.way is Split.COLUMNS and not layer.style.sections and found is not None:
            raise ValueError(
                f"tp_plan: '{layer.name}' is next to '{found}' of a {type(layer.parent).__name__}, and each "
                "rank computes some of these heads. Expected LayerPlan(Split.COLUMNS, heads(NUMBER, "
                "size=SIZE)) in the plan, and a forward that views its outputs by the size of a head, not by "
                f"'{found}'"
            )


def _refuse_whole_ties(model: nn.Module, layers: Sequence[Divided], cuts: Mapping[nn.Parameter, Cut]) -> None:
    """Refuse a parameter that is cut for one module and whole in another module."""
    divided = {(layer.module, attribute) for layer in layers for attribute in layer.cuts}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            cut = None if parameter is None else cuts.get(parameter)
            if cut is not None and (module, attribute) not in divided:
                raise ValueError(
                    f"tp_plan: '{cut.name}' is cut, but tied to '{name}.{attribute}', which is not; expected "
                    "both in the plan"
                )


def _refuse_ignored(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    cuts: Mapping[nn.Parameter, Cut],
    summed: Collection[nn.Parameter],
) -> None:
    """Refuse ignored parameters of divided layers: they are not cut, and summands of gradients not added up.

    With summands alone each rank would train other values, and nothing compares these.
    """
    owned = {original.parameter for spec in specs for original in spec.originals}
    for name, parameter in model.named_parameters():
        if parameter in owned:
            continue
        if parameter in cuts or (parameter in summed and parameter.requires_grad):
            raise ValueError(
                f"config key 'ignored': each tensor rank computes with a part of '{name}', or a summand of "
                "its gradient; expected parameters of layers that mesh.tp and mesh.sequence do not divide"
            )


def _cuts(name: str, module: nn.Module, style: LayerPlan, num_ranks: int) -> Iterator[tuple[str, Cut]]:
    """The divided parameters of a layer by their name in it."""
    is_columns = style.way not in BY_ROWS
    if isinstance(module, nn.Embedding):
        if is_columns:
            raise ValueError(
                f"tp_plan: expected 'rowwise' for the embedding '{name}', which is cut by tokens"
            )
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise ValueError(f"tp_plan: '{name}' has max_norm, scale_grad_by_freq or sparse, not supported")
        dims = {"weight": 0}
    elif isinstance(module, nn.Linear) and style.way is not Split.PACKED_ROWS:
        dims = {"weight": 0, "bias": 0} if is_columns else {"weight": 1}
    else:
        raise ValueError(
            f"tp_plan: '{name}' is a {type(module).__name__}; expected a Linear or an Embedding for "
            f"'{style.way.value}'"
        )
    for attribute, dim in dims.items():
        if attribute not in module._parameters:
            raise ValueError(
                f"tp_plan: '{name}' computes its {attribute} of other parameters, as after weight_norm; "
                f"expected a parameter for '{style.way.value}'"
            )
        parameter = module._parameters[attribute]
        if parameter is not None:
            where = f"{name}.{attribute}"
            yield attribute, Cut(where, tuple(parameter.shape), dim, num_ranks, style.sections)
