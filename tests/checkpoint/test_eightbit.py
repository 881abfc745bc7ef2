"""8-bit states in checkpoints: conversions against the reference."""

import math

import pytest
import torch

from tests.checkpoint.damage import damaged, edit_manifest
from tests.checkpoint.runs import build, maker, refused, saved, start, state, train, without_numba
from tests.optim.eightbit.reference import SIGNED, UNSIGNED, Blocks
from tests.ranks import on_ranks
from zeroshard.checkpoint import optimizers as loading
from zeroshard.checkpoint.files import MANIFEST

AFTER = range(2, 4)
HYBRID = {"stage": 3, "shard_group_size": 2}
SOME = {"min_8bit_size": 700}
"""Of the model's parameters three, of 740, 1300 and 740 elements, are quantized, and some are not."""
ALL = {"min_8bit_size": 0}
"""Also those that are smaller than a block, of one element, and of none."""


FROM_TO = {
    "AdamW": (("AdamW", {}), ("AdamW8bit", SOME)),
    "Adam": (("AdamW8bit", ALL), ("Adam", {})),
    "Adam8bit": (("AdamW8bit", SOME), ("Adam8bit", SOME)),
    "SGD": (("SGD", {"momentum": 0.9}), ("SGD8bit", ALL)),
    "SGD8bit": (("SGD8bit", SOME), ("SGD", {"momentum": 0.5})),
    "LAMB": (("LAMB", {}), ("LAMB8bit", SOME)),
    "LAMB8bit": (("LAMB8bit", ALL), ("LAMB", {})),
    "LARS": (("LARS", {}), ("LARS8bit", ALL)),
    "LARS8bit": (("LARS8bit", SOME), ("LARS", {})),
    "a higher threshold": (("AdEMAMix8bit", ALL), ("AdEMAMix8bit", SOME)),
    "a lower threshold": (("Lion8bit", {}), ("Lion8bit", ALL)),
}


@without_numba
def save_all(folder):
    """By case, the state that was saved."""
    return {
        name: state(saved(folder / name, 3, maker(kind, **options)))
        for name, ((kind, options), _) in FROM_TO.items()
    }


@pytest.fixture(scope="module")
def converted(ranks, tmp_path_factory):
    """Checkpoints of 2 ranks, and what is in them."""
    folder = tmp_path_factory.mktemp("converted")
    return folder, ranks(2, save_all, folder)[0]


@without_numba
def convert_all(folder, config):
    """By case, the state and the group after it was loaded by another optimizer; all of them can go on."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_PIECE", 512)
        for name, (_, (kind, options)) in FROM_TO.items():
            engine = start(config, maker(kind, **(options | {"lr": 1.0})), seed=1)
            engine.load_checkpoint(f"{folder}/{name}", convert_states=True)
            steps = {repr(values.get("step")) for values in engine.optimizer.state.values()}
            group = {k: v for k, v in engine.optimizer.param_groups[0].items() if k != "params"}
            found[name] = state(engine), steps, group
            assert all(map(math.isfinite, train(engine, AFTER[:1])))
    return found


SIZES = {name: p.numel() for name, p in build().named_parameters()}


def threshold_of(kind, options):
    return options.get("min_8bit_size", 4096) if kind.endswith("8bit") else math.inf


def expected(saved, threshold):
    """States as the reference quantizes and dequantizes those that were saved."""
    tensors = {}
    for (fqn, key), value in saved.items():
        if key == "step" or key.endswith("_absmax"):
            continue
        scales = saved.get((fqn, f"{key}_absmax"))
        values = UNSIGNED if key == "exp_avg_sq" else SIGNED
        there = None if scales is None else Blocks(value, scales, values)
        if SIZES[fqn] >= threshold:
            blocks = there or Blocks.of(value, values)
            tensors[fqn, key], tensors[fqn, f"{key}_absmax"] = blocks.codes, blocks.absmax
        else:
            tensors[fqn, key] = value if there is None else there.read()
    return tensors


def unequal(got, want):
    """Where states differ; counts of steps are not compared."""
    got = {name: value for name, value in got.items() if name[1] != "step"}
    return [*(got.keys() ^ want.keys())] + [
        (name, got[name], value)
        for name, value in want.items()
        if name in got and (got[name].dtype != value.dtype or not torch.equal(got[name], value))
    ]


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "config"), [(1, 0), pytest.param(4, HYBRID, marks=pytest.mark.long)])
def test_states_are_converted_to_the_nearest_codes_and_back_at_another_layout(
    ranks, converted, num_ranks, config
):
    folder, there = converted
    found = ranks(num_ranks, convert_all, folder, config)[0]
    for name, (got, steps, group) in found.items():
        was = {key: value for key, value in there[name].tensors.items() if isinstance(key, tuple)}
        now = {key: value for key, value in got.tensors.items() if isinstance(key, tuple)}
        assert not unequal(now, expected(was, threshold_of(*FROM_TO[name][1]))), name
        assert torch.equal(got.tensors["mix"], there[name].tensors["mix"])
        assert steps == {{"Adam": "tensor(2.)", "SGD8bit": "None", "LARS8bit": "None"}.get(name, "2")}, name
        kind, options = FROM_TO[name][1]
        fresh = maker(kind, **options)(torch.nn.Linear(1, 1)).param_groups[0]
        assert group.keys() == fresh.keys() - {"params"}
        assert group["lr"] == 1e-2
        assert group.get("min_8bit_size") == fresh.get("min_8bit_size")
    assert found["AdamW"][2]["weight_decay"] == 0.01
    assert found["SGD8bit"][2]["momentum"] == 0.9


@on_ranks(1)
def test_a_conversion_does_not_depend_on_the_default_dtype(tmp_path):
    saved(tmp_path, 3, maker("AdamW8bit", **SOME))
    found = []
    for default in (torch.float32, torch.bfloat16, torch.float64):
        model = build(1)
        torch.set_default_dtype(default)
        engine = start(3, maker("AdamW"), model=model)
        engine.load_checkpoint(tmp_path, convert_states=True)
        found.append(state(engine).tensors)
        torch.set_default_dtype(torch.float32)
    assert found[0].keys() == found[1].keys() == found[2].keys()
    assert all(torch.equal(value, other[name]) for other in found[1:] for name, value in found[0].items())


# -------------------------------------------------------------------------------------------------- refused


CONVERTED = {"convert_states": True}
REFUSED = {
    "lower threshold": (
        ("Lion8bit", SOME),
        ("Lion8bit", ALL),
        {},
        "expected states of 'gain' in the 8 bits that Lion8bit keeps",
    ),
    "amsgrad": (
        ("AdamW", {"amsgrad": True}),
        ("AdamW8bit", ALL),
        CONVERTED,
        "the checkpoint has amsgrad=True",
    ),
    "state of amsgrad": (
        ("AdamW", {"amsgrad": True}),
        ("AdamW8bit", ALL),
        {**CONVERTED, "restore_hyperparameters": False},
        "holds state 'max_exp_avg_sq' of 'mix', but AdamW8bit has no such state",
    ),
}


@pytest.mark.long
@on_ranks(2)
def test_what_would_train_on_with_other_numbers_is_one_error_and_changes_nothing(tmp_path):
    for name, ((kind, own), (other, others), options, message) in REFUSED.items():
        saved(tmp_path / name, 3, maker(kind, **own))
        engine = start(3, maker(other, **others), seed=1)
        train(engine, [0])
        assert message in refused(engine, tmp_path / name, **options), name


CODES, SCALES = "optimizer/mix/exp_avg", "optimizer/mix/exp_avg_absmax"


def swap_scales(content):
    content["tensors"][SCALES] = content["tensors"].pop("optimizer/tokens.weight/exp_avg_absmax")


def drop(*names):
    """Without these tensors."""
    return lambda content: [content["tensors"].pop(name) for name in names] and None


def set_dtype(name, dtype):
    return lambda content: content["tensors"][name].update(dtype=dtype)


CRAFTED = {
    "scales of another shape": (
        swap_scales,
        "state 'exp_avg_absmax' of 'mix': expected (torch.float32, (6,)), got (torch.float32, (3,))",
    ),
    "scales of another dtype": (set_dtype(SCALES, "int32"), "'exp_avg_absmax' of 'mix': expected (torch.f"),
    "codes of another dtype": (set_dtype(CODES, "int8"), "state 'exp_avg' of 'mix': expected (torch.uint8"),
    "no scales": (drop(SCALES), "found codes or scales alone, 'exp_avg' of 'mix'"),
    "no codes": (drop(CODES), "state 'exp_avg_absmax' of 'mix': expected"),
    "neither": (drop(CODES, SCALES), "found no state 'exp_avg' of 'mix'"),
}


@without_numba
def load_crafted(folder):
    engine, found = saved(folder / "good", 3, maker("AdamW8bit", **SOME)), {}
    train(engine, AFTER)
    for name, (change, _) in CRAFTED.items():
        bad = damaged(folder / "good", edit_manifest(change), "step-2.0")
        for options in ({}, CONVERTED):
            found[name] = refused(engine, bad, RuntimeError, **options)
            assert f"{bad}/step-2.0/{MANIFEST}: " in found[name]
    return found


def test_codes_and_scales_that_do_not_belong_together_are_one_error_before_anything_changes(ranks, tmp_path):
    (found,) = ranks(1, load_crafted, tmp_path)
    for name, text in found.items():
        assert CRAFTED[name][1] in text, name


# ---------------------------------------------------------------------------------------------- bitsandbytes

THEIRS_AND_OTHERS = [
    ("AdamW8bit", SOME, "AdamW8bit", SOME, {}),
    ("SGD8bit", {"momentum": 0.7, **SOME}, "SGD8bit", {"momentum": 0.5, **SOME}, {}),
    ("Lion8bit", SOME, "Lion8bit", SOME, {}),
    ("AdamW", {}, "AdamW", {}, {}),
    ("PagedAdamW8bit", ALL, "AdamW", {}, CONVERTED),
    ("SGD", {"momentum": 0.7}, "SGD8bit", {"momentum": 0.5, **ALL}, CONVERTED),
]
SLOTS = {"AdamW": "exp_avg exp_avg_sq", "Lion": "exp_avg", "SGD": "momentum_buffer"}


def common(optimizer, kind):
    """This rank's states under torch's names."""
    names = SLOTS[kind.removeprefix("Paged").removesuffix("8bit")].split()
    found = {}
    for parameter, held in optimizer.state.items():
        if "state1" not in held:
            found |= {(parameter.fqn, key): value for key, value in held.items()}
            continue
        for place, ending in (("state", ""), ("absmax", "_absmax")):
            values = [held[f"{place}{slot}"] for slot in "12" if f"{place}{slot}" in held]
            found |= {(parameter.fqn, name + ending): one for name, one in zip(names, values, strict=False)}
    return found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@on_ranks(2)
def test_bitsandbytes_and_others_load_each_others_states(tmp_path):
    """What they saved is loaded by others, and comes back: what is not as expected."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path
    import bitsandbytes

    found = []
    for number, (kind, options, other, other_options, asked) in enumerate(THEIRS_AND_OTHERS):

        def theirs(model, kind=kind, options=options):
            return getattr(bitsandbytes.optim, kind)(model.parameters(), lr=1e-3, **options)

        engine = saved(folder / str(number), 3, theirs)
        there = common(engine.optimizer, kind)
        here = start(3, maker(other, **other_options), seed=1)
        here.load_checkpoint(f"{folder}/{number}", **asked)
        wanted = expected(there, threshold_of(other, other_options))
        found += [(kind, other, *one) for one in unequal(common(here.optimizer, kind), wanted)]
        group = here.optimizer.param_groups[0]
        found += [(kind, key, group[key]) for key in ("lr", "momentum") if group.get(key) == 0.5]
        here.save_checkpoint(f"{folder}/{number}/back")
        back = start(3, theirs, seed=1)
        back.load_checkpoint(f"{folder}/{number}/back", **asked)
        want = expected(wanted, threshold_of(kind, options))
        found += [(other, kind, *one) for one in unequal(common(back.optimizer, kind), want)]
        groups = [dict(engine.optimizer.param_groups[0], params=[]) for engine in (engine, back)]
        found += [] if groups[0] == groups[1] else [(kind, groups)]
        if asked:
            assert all(map(math.isfinite, train(back, AFTER[:1])))
        else:
            assert train(back, AFTER) == train(engine, AFTER), kind
    return found
