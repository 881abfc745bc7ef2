"""Sharded parameters pass for tensors with optimizers and people, and for a weight with nobody."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import torch.optim.optimizer as torch_optimizer
from torch import nn
from torch.nn.utils import clip_grad_norm_

import zeroshard
from tests.ranks import on_ranks
from zeroshard.parameters.sharded import ShardedParameter, gradient_of
from zeroshard.parameters.state import ModuleState
from zeroshard.stepping.parts import show

NAME, UNIT, SHAPE = "model.head.weight", "model.head", torch.Size((6, 4))
HIDDEN = torch.arange(12.0).view(3, 4)
INDICES = torch.tensor([0, 1])


def sharded(values, *, requires_grad=True, is_partial=True, unit=UNIT):
    return ShardedParameter.wrap(
        values,
        requires_grad,
        fqn=NAME,
        unit_name=unit,
        full_shape=SHAPE,
        is_partial=is_partial,
        state=ModuleState(),
    )


@pytest.fixture
def weight():
    """Half of a [6, 4] weight."""
    return sharded(torch.arange(12.0))


def names_the_remedy():
    return pytest.raises(RuntimeError, match=f"(?s)(?=.*'{NAME}')(?=.*'{UNIT}')(?=.*units=)")


# ------------------------------------------------------------------------ layers outside the unit's forward


class FusedHead(torch.autograd.Function):
    """As fused losses are written: the weight comes as an argument and is used inside."""

    @staticmethod
    def forward(ctx, hidden, weight):
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


LAYERS = {
    "linear": lambda w: F.linear(HIDDEN, w),
    "linear by keyword": lambda w: F.linear(HIDDEN, weight=w),
    "linear whose shapes fit": lambda w: F.linear(torch.ones(2, 12), w),
    "at sign": lambda w: HIDDEN @ w,
    "at sign from the left": lambda w: w @ torch.ones(12, 2),
    "matmul method": lambda w: HIDDEN.matmul(w),
    "addmm": lambda w: torch.addmm(torch.zeros(3), HIDDEN, w),
    "embedding": lambda w: F.embedding(INDICES, w),
    "embedding bag": lambda w: F.embedding_bag(INDICES, w, INDICES),
    "layer norm": lambda w: F.layer_norm(torch.ones(2, 12), (12,), w),
    "convolution": lambda w: F.conv1d(torch.ones(1, 4, 9), w),
    "einsum": lambda w: torch.einsum("bd,vd->bv", HIDDEN, w),
    "tensordot": lambda w: torch.tensordot(HIDDEN, w, dims=1),
    "rows by index": lambda w: w[INDICES],
    "class weights of a loss": lambda w: F.cross_entropy(torch.ones(2, 12), INDICES, w),
    "reshaped": lambda w: w.view(6, 4),
    "added to activations": lambda w: HIDDEN + w,
}
DERIVED = {
    "transposed by T": lambda w: HIDDEN @ w.T,
    "transposed by dimensions": lambda w: HIDDEN @ w.transpose(0, 1),
    "normalized": lambda w: F.linear(HIDDEN, F.normalize(w, dim=1)),
    "fused in a function of its own": lambda w: FusedHead.apply(HIDDEN, w),
}


@pytest.mark.parametrize("use", [*LAYERS, *DERIVED])
def test_a_layer_that_gets_a_slice_for_its_weight_names_parameter_unit_and_remedy(weight, use):
    with names_the_remedy():
        (LAYERS | DERIVED)[use](weight)


@pytest.mark.parametrize("use", ["linear", "linear whose shapes fit", "at sign", "embedding", "layer norm"])
def test_a_layer_refuses_a_slice_without_gradients_too(use):
    with torch.no_grad(), names_the_remedy():
        LAYERS[use](sharded(torch.arange(12.0)))
    with names_the_remedy():
        LAYERS[use](sharded(torch.arange(12.0), requires_grad=False))


OVER_MATRICES = {
    "average in place": lambda m, w: m.mul_(0.9).add_(w, alpha=0.1),
    "average": lambda m, w: m.lerp_(w, 0.1),
    "copy": lambda m, w: m.copy_(w),
    "product": lambda m, w: w * m,
    "parameter": lambda m, w: nn.Parameter(m) - w,
}


@pytest.mark.parametrize("use", OVER_MATRICES)
def test_a_slice_is_never_broadcast_over_a_matrix(weight, use):
    with torch.no_grad(), names_the_remedy():
        OVER_MATRICES[use](torch.ones(2, 12), weight)


@pytest.mark.parametrize(
    "penalty",
    [
        lambda w: w.square().sum(),
        lambda w: (w * 2).abs().mean(),
        lambda w: torch.linalg.vector_norm(w),
        lambda w: torch.stack([w.sum(), w.max()]).sum(),
        lambda w: F.linear(torch.ones(2, 12).double(), w.double()).sum(),
    ],
    ids=["squares", "scaled", "norm", "stacked", "cast"],
)
def test_a_loss_that_depends_on_a_slice_raises_in_backward(weight, penalty):
    loss = penalty(weight)
    with names_the_remedy():
        loss.backward()
    assert weight.grad is None


class Outside(nn.Module):
    """The root's forward uses a block's parameter, in a way that fits slices as well."""

    def __init__(self, use):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.use = use

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.use(x, self.blocks[1])


USES = {
    "bias": lambda x, block: x + block.bias,
    "mean": lambda x, block: x * block.weight.mean(),
    "index": lambda x, block: x * block.weight[0],
    "in place": lambda x, block: block.bias.add_(x.mean()),
    "list": lambda x, block: torch.cat([x.flatten(), block.bias]),
    "data": lambda x, block: x * block.bias.data.sum(),
}


def is_linear(module):
    return isinstance(module, nn.Linear)


@on_ranks(1, 2)
def test_a_forward_that_uses_a_parameter_of_another_unit_raises_without_gradients_too(num_ranks):
    config = {"stage": 1 if num_ranks == 1 else 3, "units": is_linear, "precision": {"param_dtype": "bf16"}}
    for use in USES.values():
        engine, *_ = zeroshard.initialize(Outside(use), None, config)
        for gradients in (torch.no_grad(), torch.enable_grad()):
            with gradients, pytest.raises(RuntimeError, match=r"blocks\.1.*outside the forward.*units="):
                engine(torch.ones(2, 4))


# ---------------------------------------------------------------------------------------------- inspection


def test_a_slice_can_be_inspected_like_any_tensor(weight):
    plain = torch.arange(12.0)
    assert torch.equal(weight.detach(), plain)
    assert torch.equal(weight.clone(), plain)
    assert (weight.numel(), weight.shape, weight.full_shape) == (12, (12,), SHAPE)
    assert (weight.norm().item(), weight.sum().item()) == (plain.norm().item(), 66)
    assert weight.tolist() == plain.tolist()
    assert weight.isfinite().all()
    assert (weight > 5).sum() == 6
    assert isinstance(weight, nn.Parameter)


@pytest.mark.parametrize("attempt", [copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("held_by", [lambda w: w, lambda w: [w], lambda w: torch.optim.SGD([w])])
def test_a_slice_is_neither_copied_nor_pickled_by_itself_or_in_what_holds_it(weight, attempt, held_by):
    with pytest.raises(RuntimeError, match=r"engine\.full_state_dict\(\)"):
        attempt(held_by(weight))


def test_values_can_be_changed_through_data_as_hand_written_optimizers_do():
    flat = torch.zeros(20)
    weight = sharded(flat[:12])
    weight.data.add_(1)
    weight.data -= 3 * torch.ones(12)
    weight.data[0] = 5
    assert torch.equal(flat, torch.tensor([5.0] + [-2.0] * 11 + [0.0] * 8))


def test_replacing_the_data_is_refused_because_the_slice_would_leave_its_buffer(weight):
    with pytest.raises(RuntimeError, match=f"'{NAME}'"):
        weight.data = torch.zeros(12)
    assert torch.equal(weight.detach(), torch.arange(12.0))


@pytest.mark.parametrize(
    "change", [nn.Parameter.requires_grad_, lambda p, on: setattr(p, "requires_grad", on)]
)
def test_what_is_trained_can_be_frozen_and_trained_again_and_what_is_frozen_cannot_be_trained(weight, change):
    for wanted in (True, False, False, True):
        change(weight, wanted)
        assert weight.requires_grad is wanted
    frozen = sharded(torch.arange(12.0), requires_grad=False)
    change(frozen, False)
    with pytest.raises(RuntimeError, match=f"'{NAME}'.* was frozen at initialize"):
        change(frozen, True)
    assert not frozen.requires_grad


# --------------------------------------------------------------------------------- torch's gradient readers


def test_torchs_clipping_by_norm_is_refused_on_slices_with_what_to_use_instead(weight):
    weight.grad = torch.full((12,), 3.0)
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"engine\.clip_grad_norm_") as caught:
        clip_grad_norm_([other, weight], 1.0)
    assert f"'{NAME}'" in str(caught.value)
    assert torch.equal(weight.grad, torch.full((12,), 3.0))


@pytest.mark.parametrize(("use", "fused"), [("unscale_", False), ("step", False), ("step", True)])
def test_torchs_gradient_scaler_is_refused_on_slices_with_what_to_use_instead(weight, use, fused):
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    weight.grad = torch.ones(12)
    with pytest.raises(RuntimeError, match="loss_scale") as caught:
        getattr(scaler, use)(optimizer)
    assert f"'{NAME}'" in str(caught.value)
    assert torch.equal(weight.detach(), torch.arange(12.0))


# ---------------------------------------------------------------------------------------------- optimizers


def test_torch_takes_the_fast_path_of_its_optimizers_for_slices(weight, monkeypatch):
    """Fails if torch keeps its list of types elsewhere: optimizers on GPUs would then run a loop."""

    class Unlisted(nn.Parameter):
        pass

    for devices in ("_get_foreach_kernels_supported_devices", "_get_fused_kernels_supported_devices"):
        monkeypatch.setattr(torch_optimizer, devices, lambda: ["cpu"])
    plain, unlisted = nn.Parameter(torch.zeros(2)), Unlisted(torch.zeros(2))
    choose = torch_optimizer._default_to_fused_or_foreach
    assert choose([plain], False, False) == choose([weight], False, False) == (False, True)
    assert choose([plain], False, True) == choose([weight], False, True) == (True, False)
    assert choose([unlisted], False, False) == (False, False)


def test_a_gradient_of_another_shape_is_refused_with_the_way_to_give_a_whole_one(weight):
    with pytest.raises(RuntimeError, match=f"'{NAME}'.*set_full_gradient") as caught:
        weight.grad = torch.zeros(SHAPE)
    assert "assign a gradient of size" in str(caught.value)
    assert weight.grad is None
    weight.grad = gradient = torch.ones(12)
    assert weight.grad is gradient
    weight.grad += 1
    assert weight.grad is gradient
    assert gradient.tolist() == [2.0] * 12
    del weight.grad
    assert weight.grad is None


def test_a_gradient_on_another_device_is_kept_for_a_step_and_refused_of_the_user(weight):
    gradient = torch.empty(12, device="meta")
    show(weight, weight.detach()[:6], gradient[:6])
    assert gradient_of(weight).device.type == "meta"
    with pytest.raises(RuntimeError, match=NAME):
        weight.grad = gradient[:6]
