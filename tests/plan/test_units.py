"""Which modules become units, and which unit owns which parameter."""

import re
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from tests.distributed.training import build
from zeroshard.assemble import shard_over
from zeroshard.comm.collectives import Axis
from zeroshard.comm.mesh import Axes
from zeroshard.config.sections import Config
from zeroshard.parallel.tensor.division import Division
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.parameters.state import ModuleState
from zeroshard.plan.units import LARGE, find_units

WIDTH = 64


class Attention(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.out = nn.Linear(width, width, bias=False)


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class OtherBlock(Block):
    pass


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, blocks, vocabulary=10, width=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = blocks
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)


class Holder(nn.Module):
    """Takes what it is given as attributes: modules and parameters."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def units_of(model, policy=None):
    """Unit name -> the names of the parameters that it owns."""
    return {spec.name: [original.fqn for original in spec.originals] for spec in find_units(model, policy)}


def names_of(model, policy=None):
    return [spec.name for spec in find_units(model, policy)]


def refuses(*words):
    return pytest.raises(ValueError, match="".join(f"(?=.*{re.escape(word)})" for word in words))


def assert_owned_once(model, policy=None):
    owned = [original for spec in find_units(model, policy) for original in spec.originals]
    assert sorted(original.fqn for original in owned) == sorted(name for name, _ in model.named_parameters())
    assert {id(original.parameter) for original in owned} == {id(p) for p in model.parameters()}


# ------------------------------------------------------------------------------------- repeated blocks


def test_repeated_blocks_of_a_list_are_units_and_the_root_owns_the_rest():
    groups = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.Sequential(Block(), Block())])
    assert names_of(Model(groups)) == ["", "blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"]
    model = Model(nn.ModuleList([Block() for _ in range(3)]))
    units = units_of(model)
    assert list(units) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert units[""] == ["embedding.weight", "norm.weight", "norm.bias", "head.weight"]
    for number in range(3):
        prefix = f"blocks.{number}."
        assert units[f"blocks.{number}"] == [
            name for name, _ in model.named_parameters() if name.startswith(prefix)
        ]


@pytest.mark.parametrize(
    "blocks",
    [
        nn.ModuleList([Block()]),
        nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        nn.ModuleDict({"a": Block(), "b": Block()}),
        nn.ModuleList([nn.ParameterList([torch.zeros(2)]), nn.ParameterList([torch.zeros(2)])]),
    ],
    ids=["one block", "plain layers", "plain sequence", "a dict", "parameter lists"],
)
def test_what_is_not_a_repeated_block_stays_with_the_root(blocks):
    assert names_of(Model(blocks)) == [""]


def test_experts_are_not_units_and_what_holds_them_is_one_unless_it_is_the_root():
    mixture = Holder(experts=nn.ModuleList(Block() for _ in range(3)))
    assert names_of(mixture) == [""]
    assert names_of(nn.Sequential(mixture, nn.Linear(2, 2))) == ["", "0"]
    large = Holder(experts=nn.ModuleList(nn.Linear(1024, 1024, device="meta") for _ in range(2)))
    assert names_of(large) == [""]


# ---------------------------------------------------------------------------------------- transformers


def test_blocks_that_a_model_names_itself_are_units_wherever_they_are():
    class Pretrained(Model):
        _no_split_modules = ["OtherBlock"]  # noqa: RUF012 (as transformers has it)

    model = Pretrained(nn.ModuleDict({"a": OtherBlock(), "b": nn.ModuleList([Block(), OtherBlock()])}))
    assert names_of(model) == ["", "blocks.a", "blocks.b.1"]
    assert names_of(Holder(inner=model)) == ["", "inner.blocks.a", "inner.blocks.b.1"]


def test_layers_of_a_transformers_llama_are_units():
    model = build("transformers Llama")
    units = units_of(model)
    assert list(units) == ["", "model.layers.0", "model.layers.1"]
    assert units[""] == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert_owned_once(model)


# ------------------------------------------------------------------------------------------ what is asked


def test_asked_class_names_are_units_at_every_depth():
    model = Model(nn.ModuleList([Block(), OtherBlock()]))
    assert names_of(model, ["Attention"]) == ["", "blocks.0.attention", "blocks.1.attention"]
    nested = ["", "blocks.0", "blocks.0.attention", "blocks.1.attention"]
    assert names_of(model, ("Block", "Attention")) == nested
    assert names_of(model, Config(units=[Block, "Attention"]).units) == nested
    assert names_of(model, Config(units="Block").units) == ["", "blocks.0"]
    chosen = Config(units=lambda module: isinstance(module, nn.LayerNorm | Attention))
    assert names_of(model, chosen.units) == ["", "blocks.0.attention", "blocks.1.attention", "norm"]


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ("1", ["blocks.1"]),
        ("*.0", ["blocks.0", "blocks.0.mlp.0", "blocks.1.mlp.0"]),
        ("blocks.0", ["blocks.0"]),
        ("attention.out", ["blocks.0.attention.out", "blocks.1.attention.out"]),
        ("norm", ["norm"]),  # the full name of one
        ("Attention", ["blocks.0.attention", "blocks.1.attention"]),
    ],
)
def test_modules_that_are_named_or_fit_a_pattern_are_units(entry, names):
    model = Model(nn.ModuleList([Block(), Block()]))
    model.blocks[0].norm = nn.LayerNorm(4)
    assert names_of(model, Config(units=entry).units) == ["", *names]


def test_a_misspelt_class_or_name_is_refused_with_close_ones():
    model = Model(nn.ModuleList([OtherBlock()]))
    with refuses("'units'", "'OtherBlok'", "close to it are 'OtherBlock'"):
        find_units(model, ["OtherBlok"])
    with refuses("'units'", "'atention'", "close to it are 'attention'"):
        find_units(model, ["atention"])


# ------------------------------------------------------------------------------- tied and shared parameters


def test_large_embeddings_and_heads_outside_the_blocks_are_units_unless_they_are_tied():
    model = Model(nn.ModuleList([Block(WIDTH), Block(WIDTH)]), vocabulary=LARGE // WIDTH, width=WIDTH)
    units = units_of(model)
    assert list(units) == ["", "embedding", "blocks.0", "blocks.1", "head"]
    assert (units["embedding"], units["head"]) == (["embedding.weight"], ["head.weight"])
    model.head.weight = model.embedding.weight
    root, *others = find_units(model, None)
    assert [spec.name for spec in others] == ["blocks.0", "blocks.1"]
    tied = next(original for original in root.originals if original.fqn == "embedding.weight")
    assert tied.owners == ((model.embedding, "weight"), (model.head, "weight"))
    assert_owned_once(model)


def test_a_parameter_tied_across_blocks_goes_to_the_root():
    model = Model(nn.ModuleList([Block(), Block()]))
    model.blocks[1].mlp[0].weight = model.blocks[0].mlp[0].weight
    assert "blocks.0.mlp.0.weight" in units_of(model)[""]
    assert_owned_once(model)


def enclosing_units(root, units, holders):
    """By brute force: the units without which no holder can be reached from the root, outermost first."""

    def reachable(without):
        found, todo = set(), [root] if root is not without else []
        while todo:
            module = todo.pop()
            if module not in found:
                found.add(module)
                todo += [child for child in module._modules.values() if child is not without]
        return found

    enclosing = [unit for unit in units if not reachable(unit) & set(holders)]
    # An inner unit cannot be reached without the outer one.
    return sorted(enclosing, key=lambda unit: sum(unit not in reachable(other) for other in enclosing))


@st.composite
def module_graphs(draw):
    """A root with modules that may be shared, parameters that may be tied, and the modules to be units."""
    modules = [nn.Module() for _ in range(draw(st.integers(1, 7)))]
    for number, module in enumerate(modules[1:], start=1):
        for parent in draw(st.sets(st.integers(0, number - 1), min_size=1, max_size=3)):
            modules[parent].add_module(f"child{number}", module)
    for number in range(draw(st.integers(1, 4))):
        parameter = nn.Parameter(torch.zeros(2))
        for holder in draw(st.sets(st.sampled_from(range(len(modules))), min_size=1, max_size=3)):
            modules[holder].register_parameter(f"weight{number}", parameter)
    return modules[0], draw(st.sets(st.sampled_from(modules)))


@given(module_graphs())
def test_every_parameter_belongs_to_the_lowest_unit_that_encloses_all_its_uses(graph):
    root, chosen = graph
    owner = {
        original.parameter: spec.module
        for spec in find_units(root, lambda module: module in chosen)
        for original in spec.originals
    }
    assert set(owner) == set(root.parameters())
    for parameter, unit in owner.items():
        holders = [m for m in root.modules() if any(p is parameter for p in m._parameters.values())]
        assert unit is enclosing_units(root, {root, *chosen}, holders)[-1]


@given(module_graphs())
def test_parameters_keep_their_names_and_know_every_place_that_holds_them(graph):
    root, chosen = graph
    names = {parameter: name for name, parameter in root.named_parameters()}
    for spec in find_units(root, lambda module: module in chosen):
        for original in spec.originals:
            assert original.fqn == names[original.parameter]
            places = {
                (module, attribute)
                for module in root.modules()
                for attribute, parameter in module._parameters.items()
                if parameter is original.parameter
            }
            assert set(original.owners) == places
            assert len(original.owners) == len(places)


# ------------------------------------------------------------------------------------ groups and refusals


def holding(dtype):
    weight = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=dtype.is_complex)
    return Model(nn.ModuleList([Block(), Holder(codes=weight)]))


def sharded_already():
    slice_of = {"full_shape": torch.Size((4,)), "is_partial": True, "state": ModuleState()}
    weight = ShardedParameter.wrap(torch.zeros(2), True, fqn="weight", unit_name="", **slice_of)
    return Holder(inner=Holder(weight=weight))


def hooked(kind):
    model = Model(nn.ModuleList([Block(), Block()]))
    getattr(model.norm.weight, kind)(lambda gradient: None)
    return model


def embedding(**options):
    return nn.Sequential(nn.Linear(2, 2), nn.Embedding(4, 2, **options))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *(
            (partial(holding, dtype), ("'blocks.1.codes'", str(dtype)))
            for dtype in (torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64)
        ),
        (lambda: nn.Sequential(nn.ReLU(), nn.LazyLinear(3)), ("'1.weight'", "lazy")),
        (sharded_already, ("'inner.weight'", "already")),
        (partial(hooked, "register_hook"), ("'norm.weight'", "hooks")),
        (partial(hooked, "register_post_accumulate_grad_hook"), ("'norm.weight'", "hooks")),
        (partial(embedding, sparse=True), ("'1'", "sparse")),
        (partial(embedding, max_norm=1.0), ("'1'", "max_norm")),
    ],
)
def test_what_sharding_would_break_is_refused_by_name(make, words):
    with refuses(*words):
        find_units(make(), None)


def test_a_parameter_without_values_is_refused_by_name_when_it_is_sharded():
    model = nn.Sequential(nn.Linear(2, 2), Holder(weight=nn.Parameter(torch.empty(2, device="meta"))))
    device = torch.device("cpu")
    axes = Axes.of_one_group(None, Axis(None, device=device, timeout_s=10))
    with pytest.raises(ValueError, match=r"'1\.weight' is on the meta device"):
        shard_over(model, Division([], find_units(model, None)), Config(), axes)
    assert not model[0].weight.is_meta
    assert model[0].weight.shape == (2, 2)
