"""8-bit optimizers against the reference: codes and scales to the bit, parameters within 1e-6.

Both kernels: numba's, and the torch operations that take its place.
"""

import io
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.optim.eightbit.cases import KINDS, OPTIONS, check_states, gradients
from tests.optim.eightbit.reference import Reference
from zeroshard.optim import AdamW8bit, AdEMAMix8bit, Lion8bit, SGD8bit


@pytest.mark.long_where(kernel=["numba"], name=["Adam8bit", "SGD8bit"])
@pytest.mark.long_where(size=[70_001])
@pytest.mark.long_where(size=[5003], name=[name for name in KINDS if name != "AdamW8bit"])
@pytest.mark.parametrize("size", [4096, 5003, 70_001])
@pytest.mark.parametrize("name", KINDS)
def test_codes_and_scales_are_those_of_the_reference(name, size, kernel):
    torch.manual_seed(1)
    parameter = nn.Parameter(torch.randn(size))
    reference = Reference(name, parameter.detach().clone())
    optimizer = KINDS[name]([parameter], **OPTIONS[name])
    for g in gradients((size,), 5):
        parameter.grad = g.clone()
        optimizer.step()
        reference.step(g, **OPTIONS[name])
        check_states(optimizer.state[parameter], reference)
        torch.testing.assert_close(parameter.detach(), reference.p, rtol=1e-6, atol=1e-6)
        assert torch.equal(parameter.grad, g), "a gradient is not changed"
    assert optimizer.state[parameter]["step"] == 5


@pytest.mark.parametrize("name", KINDS)
def test_small_parameters_have_float32_states(name, kernel):
    """As torch's own optimizer, where it has one."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(4095))
    twin = nn.Parameter(parameter.detach().clone())
    optimizer = KINDS[name]([parameter], **OPTIONS[name])
    plain = {
        "AdamW8bit": torch.optim.AdamW,
        "Adam8bit": torch.optim.Adam,
        "SGD8bit": torch.optim.SGD,
    }
    other = plain[name]([twin], **OPTIONS[name]) if name in plain else None
    for g in gradients((4095,), 5):
        parameter.grad, twin.grad = g.clone(), g.clone()
        optimizer.step()
        if other is not None:
            other.step()
    state = optimizer.state[parameter]
    assert all(value.dtype == torch.float32 for value in state.values() if isinstance(value, torch.Tensor))
    assert not any(key.endswith("_absmax") for key in state)
    if other is not None:  # float32 rounding of five steps
        torch.testing.assert_close(parameter, twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(5000,), (8, 4, 257)])
def test_a_state_at_rest_takes_two_bytes_and_a_scale_for_each_block(shape, kernel):
    parameter = nn.Parameter(torch.randn(shape))
    optimizer = AdamW8bit([parameter])
    parameter.grad = torch.randn(shape)
    optimizer.step()
    state = optimizer.state[parameter]
    assert state["exp_avg"].shape == parameter.shape
    num_bytes = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    assert num_bytes == 2 * parameter.numel() + 2 * 4 * -(-parameter.numel() // 256)


def test_parameters_that_are_not_contiguous_or_not_float32(kernel):
    torch.manual_seed(0)
    values = torch.randn(80, 64)
    plain = nn.Parameter(values.t().contiguous())
    turned = nn.Parameter(values.t())
    half = nn.Parameter(values.t().contiguous().bfloat16())
    optimizers = [AdamW8bit([p], lr=1e-2) for p in (plain, turned, half)]
    g = torch.randn(64, 80)
    for p, optimizer in zip((plain, turned, half), optimizers, strict=True):
        p.grad = g.to(p.dtype)
        optimizer.step()
    assert not turned.is_contiguous()
    assert torch.equal(plain, turned)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), plain, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_keeps_codes_and_scales(dtype, kernel):
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5000).to(dtype))
    optimizer = AdamW8bit([parameter], lr=1e-2)
    for g in gradients((5000,), 2):
        parameter.grad = g.to(dtype)
        optimizer.step()
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    twin = nn.Parameter(parameter.detach().clone())
    other = AdamW8bit([twin], lr=1e-2)
    other.load_state_dict(torch.load(stream, weights_only=True))
    for key, value in optimizer.state[parameter].items():
        loaded = other.state[twin][key]
        assert (
            torch.equal(loaded, value) and loaded.dtype == value.dtype if key != "step" else loaded == value
        )
    for g in gradients((5000,), 2, seed=1):
        parameter.grad, twin.grad = g.to(dtype), g.to(dtype)
        optimizer.step()
        other.step()
    assert torch.equal(parameter, twin)


def test_autograd_sees_that_a_step_changed_the_parameter(kernel):
    parameter = nn.Parameter(torch.randn(5120))
    parameter.grad = torch.randn(5120)
    loss = (parameter**2).sum()
    AdamW8bit([parameter]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_learning_rate_can_be_a_tensor_and_be_scheduled(kernel):
    parameters = [nn.Parameter(torch.ones(5000)) for _ in range(2)]
    optimizers = [AdamW8bit([parameters[0]], lr=torch.tensor(0.5)), AdamW8bit([parameters[1]], lr=0.5)]
    for _ in range(3):
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            parameter.grad = parameter.detach() * 2
            optimizer.step()
    assert torch.equal(*parameters)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (AdamW8bit, {"lr": -1}, "lr: expected a finite number >= 0, got -1"),
        (AdamW8bit, {"lr": float("nan")}, "lr: expected a finite number >= 0, got nan"),
        (AdamW8bit, {"betas": (0.9, 1.0)}, "betas: expected 2 numbers from 0 to below 1"),
        (AdamW8bit, {"betas": (0.9,)}, "betas: expected 2 numbers from 0 to below 1"),
        (AdamW8bit, {"betas": 0.9}, "betas: expected 2 numbers from 0 to below 1"),
        (AdamW8bit, {"eps": "small"}, "eps: expected a finite number >= 0, got 'small'"),
        (AdEMAMix8bit, {"betas": (0.9, 0.999)}, "betas: expected 3 numbers from 0 to below 1"),
        (AdEMAMix8bit, {"t_alpha": 0}, "t_alpha: expected a number above 0 or None, got 0"),
        (Lion8bit, {"weight_decay": -0.1}, "weight_decay: expected a finite number >= 0"),
        (SGD8bit, {"lr": 0.1, "momentum": 0}, "momentum: expected a number above 0 and below 1, got 0"),
        (AdamW8bit, {"lr": float("inf")}, "lr: expected a finite number >= 0, got inf"),
        (AdamW8bit, {"min_8bit_size": True}, "min_8bit_size: expected an integer >= 0, got True"),
        (AdamW8bit, {"min_8bit_size": -1}, "min_8bit_size: expected an integer >= 0, got -1"),
    ],
)
def test_a_number_out_of_range_is_an_error(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind([nn.Parameter(torch.ones(2))], **options)


def test_a_sparse_gradient_is_refused():
    layer = nn.Embedding(100, 64, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="expected a dense, real gradient"):
        AdamW8bit(layer.parameters()).step()


@pytest.mark.parametrize("name", KINDS)
def test_a_nan_reaches_the_parameter(name, kernel):
    """No silent repair: the block that it is in becomes NaN, no other does."""
    parameter = nn.Parameter(torch.ones(5000))
    optimizer = KINDS[name]([parameter], **OPTIONS[name])
    for _ in range(2):
        parameter.grad = torch.ones(5000)
        parameter.grad[300] = torch.nan
        optimizer.step()
    assert parameter[300].isnan()
    assert parameter[:256].isfinite().all()
    assert parameter[512:].isfinite().all()


@pytest.mark.long
@pytest.mark.long_where(is_broken=[False])
@pytest.mark.parametrize("is_broken", [False, True])
def test_without_numba_or_with_a_broken_one_there_is_one_warning(is_broken, tmp_path):
    (tmp_path / "numba.py").write_text("raise RuntimeError('made for another NumPy')")
    lack = f"sys.path.insert(0, {str(tmp_path)!r})" if is_broken else "sys.modules['numba'] = None"
    code = (
        f"import sys; {lack}\n"
        "import torch, warnings\n"
        "from torch import nn\n"
        "from zeroshard.optim import AdamW8bit\n"
        "p = nn.Parameter(torch.randn(5000)); o = AdamW8bit([p])\n"
        "warnings.simplefilter('always')\n"
        "for _ in range(3):\n"
        "    p.grad = torch.randn(5000); o.step()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.count("without numba") == 1
    assert "pip install numba" in result.stderr


@pytest.mark.parametrize("name", KINDS)
def test_a_step_that_fails_is_not_counted(name, monkeypatch):
    def fail(*_):
        raise RuntimeError("no memory")

    parameter = nn.Parameter(torch.ones(5000))
    optimizer = KINDS[name]([parameter], **OPTIONS[name])
    parameter.grad = torch.ones(5000)
    optimizer.step()
    with monkeypatch.context() as patch:
        patch.setattr("zeroshard.optim.eightbit.base.take_step", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            optimizer.step()
    assert optimizer.state[parameter]["step"] == 1


def test_the_scale_of_zeros_has_no_sign(kernel):
    parameter = nn.Parameter(torch.ones(256 * 64))
    optimizer = AdamW8bit([parameter])
    parameter.grad = torch.zeros(256 * 64)
    optimizer.step()
    assert (optimizer.state[parameter]["exp_avg_absmax"].view(torch.int32) == 0).all()


def test_threads_do_not_change_the_bits():
    results = []
    num_threads = torch.get_num_threads()
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(400_000))
        optimizer = AdamW8bit([parameter])
        for g in gradients((400_000,), 2):
            parameter.grad = g
            optimizer.step()
        results.append((parameter.detach(), optimizer.state[parameter]["exp_avg_sq"]))
    torch.set_num_threads(num_threads)
    for result in results[1:]:
        assert torch.equal(result[0], results[0][0])
        assert torch.equal(result[1], results[0][1])
