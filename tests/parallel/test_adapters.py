"""LoRA over divided layers trains as in one process."""

import re
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.parallel import models
from tests.parallel.runs import (
    BATCH,
    PLAN,
    Kind,
    build,
    compare,
    digests,
    divided,
    initialize,
    loss_of,
    plain,
)
from tests.ranks import on_ranks
from zeroshard.parallel.tensor.division import plan_division
from zeroshard.plan.units import find_units

LAYERS = ["q", "k", "v", "out", "up", "down"]


def adamw(parameters):
    return torch.optim.AdamW((p for p in parameters if p.requires_grad), lr=1e-2)


def with_lora(model, targets, **options):
    """A model with adapters that change its outputs from the start."""
    lora = peft.LoraConfig(target_modules=targets, **{"r": 3, "init_lora_weights": False} | options)
    return peft.get_peft_model(model, lora)


def behind(plan):
    return {f"base_model.model.{pattern}": style for pattern, style in plan.items()}


def adapted(seed, **options):
    return with_lora(build(seed), LAYERS, **options).double()


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 3), (4, 1)])
def test_adapters_of_divided_layers_train_as_in_one_process(ranks, num_ranks, stage):
    kind = Kind(adapted, loss_of, behind(PLAN), BATCH)
    found = ranks(num_ranks, divided, {"stage": stage, "mesh": {"tp": 2}}, adamw, kind=kind)
    compare(found, plain(adamw, kind=kind), losses=1e-9, norms=1e-6, values=1e-8)
    base = {name: value for name, value in build(0).state_dict().items() if "up" in name}
    for name, value in base.items():
        path, _, last = name.rpartition(".")
        assert torch.equal(found[0].state[f"base_model.model.{path}.base_layer.{last}"], value)


def of_transformers(seed=0):
    return with_lora(models.build("Llama", seed), ["q_proj", "v_proj", "o_proj"], r=2).double().eval()


def test_plans_of_transformers_hold_behind_adapters(ranks):
    kind = models.kind_of("Llama")._replace(build=of_transformers)
    found = ranks(2, divided, {"stage": 3, "mesh": {"tp": 2}}, adamw, kind=kind, steps=1)
    # The loss of transformers is in float32, and a first step of Adam is of one size.
    compare(found, plain(adamw, kind=kind, steps=1), losses=1e-6, norms=1e-5, values=1e-3)


@pytest.mark.parametrize(
    ("tp", "options", "text"),
    [
        (2, {"use_dora": True}, "'base_model.model.blocks.0.up' is a Linear with an adapter, a Linear of "
         "peft.tuners.lora.layer; expected LoRA without variants over a Linear, or 'replicate' for the"),
        (2, {"kasa_config": {}}, "is a Linear with an adapter, a Linear of peft.tuners.lora.layer; expected"),
        (4, {}, "v_proj' has an adapter and is 'colwise_shared_heads'; expected no adapter there, or as many "
         "heads as ranks"),
    ],
)  # fmt: skip
def test_adapters_that_cannot_be_divided_are_refused(tp, options, text):
    model = of_transformers() if tp == 4 else adapted(0, **options)
    plan = None if tp == 4 else {"base_model.model.blocks.*.up": "colwise"}
    with pytest.raises(ValueError, match=re.escape(text)):
        plan_division(model, find_units(model, None), plan, tp)


def test_adapters_where_norms_work_on_parts_are_refused():
    model = adapted(0)
    plan = behind(PLAN | {"blocks.*.norm": "sequence", "blocks.0": "sequence_split"})
    with pytest.raises(ValueError, match=r"blocks\.0\.q' has an adapter; expected none where norms work on"):
        plan_division(model, find_units(model, None), plan, 2)


def test_adapters_with_code_of_the_user_are_refused():
    """`test_own_forwards.py` follows the error."""
    model = adapted(0)
    model.base_model.model.blocks[0].up.register_forward_hook(lambda module, args, output: 3.0 * output)
    with pytest.raises(ValueError, match=r"blocks\.0\.up' is a Linear with hooks, which would get a part"):
        plan_division(model, find_units(model, None), behind(PLAN), 2)


@pytest.mark.parametrize(
    ("kind", "parameter"), [("Llama", "q_proj.weight"), ("Mixtral", "experts.gate_up_proj")]
)
def test_adapters_of_parameters_are_refused_by_name(kind, parameter):
    lora = peft.LoraConfig(r=2, target_modules=[], target_parameters=[parameter])
    model = peft.get_peft_model(models.build(kind), lora)
    name = parameter.rpartition(".")[2]
    with pytest.raises(ValueError, match=f"has an adapter of its parameter '{name}', as of `target_param"):
        initialize(model, adamw, {"stage": 1, "mesh": {"tp": 2}}, None)


@on_ranks(2)
def test_dropout_of_adapters_is_that_of_their_inputs():
    """Parts have other masks, whole inputs the same; what each rank holds whole trains alike."""
    torch.manual_seed(dist.get_rank())
    model = models.build("Llama", seed=dist.get_rank(), attention_dropout=0.1).float()
    lora = peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.2)  # B begins with zeros
    engine = initialize(peft.get_peft_model(model, lora), adamw, {"stage": 1, "mesh": {"tp": 2}}, None)
    masks, dropout = [], F.dropout

    def noted(value, *args, **kwargs):
        result = dropout(value, *args, **kwargs)
        masks.append((tuple(value.shape), hash(tuple((result == 0).flatten().tolist()))))
        return result

    with mock.patch.object(F, "dropout", noted):
        for number in range(2):
            tokens = models.tokens_of(number)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
    everyone = [None, None]
    dist.all_gather_object(everyone, (digests(engine), masks))
    (whole, masks), (others, their_masks) = everyone
    assert whole == others
    assert masks
    for (shape, mask), (_, other) in zip(masks, their_masks, strict=True):
        assert (mask == other) == (shape[-1] == models.GROUPED["hidden_size"]), shape
