"""8-bit optimizers against the reference: codes and scales to the bit, parameters within 1e-6.

Both kernels: numba's, and the torch operations that take its place.
"""

import io
import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch import nn

from tests.optim.eightbit.cases import (
    KINDS,
    LAYERWISE,
    OPTIONS,
    ROUNDED,
    RULES,
    begin,
    check_states,
    differences,
    gradients,
    hard_gradients,
    numbers_of,
    step_plainly,
)
from tests.optim.eightbit.reference import Reference
from zeroshard.optim import AdamW8bit
from zeroshard.optim.eightbit.blocks import codebook
from zeroshard.optim.eightbit.rules import SGD
from zeroshard.optim.eightbit.step import over_threads, take_step
from zeroshard.stepping.rounding import Bits, Rounding

COMPILED = ["AdamW8bit"]
"""A rule with two states, which numba compiles in seconds; those of bfloat16 take one with one state."""
ALL = KINDS | LAYERWISE
BIASES = {"weight_decay": 0.0, "trust_ratio": False}
PLAIN = {"AdamW8bit": torch.optim.AdamW, "Adam8bit": torch.optim.Adam, "SGD8bit": torch.optim.SGD}


def stepped(name, shape, num_steps=1, dtype=torch.float32, **options):
    """A parameter and its optimizer after some steps."""
    torch.manual_seed(1)
    parameter = nn.Parameter(torch.randn(shape).to(dtype))
    optimizer = ALL[name]([parameter], **OPTIONS[name] | options)
    go_on(parameter, optimizer, num_steps)
    return parameter, optimizer


def go_on(parameter, optimizer, num_steps, seed=0):
    for g in gradients(parameter.shape, num_steps, seed):
        parameter.grad = g.to(parameter.dtype)
        optimizer.step()


@pytest.mark.long_where(kernel=["numba"], name=[name for name in ALL if name not in COMPILED])
@pytest.mark.long_where(size=[70_001])
@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, 4096) for name in ALL), ("AdamW8bit", 5003), *((name, 70_001) for name in ALL)],
)
def test_codes_and_scales_are_those_of_the_reference(name, size, kernel):
    for own in ({}, BIASES) if name in LAYERWISE else ({},):
        parameter, optimizer = stepped(name, size, 0, **own)
        reference = Reference(name, parameter.detach().clone())
        for g in gradients((size,), 5):
            parameter.grad = g.clone()
            optimizer.step()
            reference.step(g, **OPTIONS[name] | own)
            check_states(optimizer.state[parameter], reference)
            torch.testing.assert_close(parameter.detach(), reference.p, rtol=1e-6, atol=1e-6)
            assert torch.equal(parameter.grad, g) or name in LAYERWISE, "a gradient is not changed"
        assert optimizer.state[parameter]["step"] == 5


@pytest.mark.parametrize("name", ALL)
def test_small_parameters_have_float32_states(name):
    """As torch's own optimizer, where it has one."""
    parameter, optimizer = stepped(name, 4095, 5)
    tensors = {key: one for key, one in optimizer.state[parameter].items() if key != "step"}
    assert {one.dtype for one in tensors.values()} == {torch.float32}
    assert not any(key.endswith("_absmax") for key in tensors)
    if name in PLAIN:  # float32 rounding of five steps
        twin, _ = stepped(name, 4095, 0)
        go_on(twin, PLAIN[name]([twin], **OPTIONS[name]), 5)
        torch.testing.assert_close(parameter, twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [4096, 300])
def test_the_default_dtype_changes_no_number(default, size, kernel):
    want, _ = stepped("AdamW8bit", size, 3)
    parameter, optimizer = stepped("AdamW8bit", size, 0)
    all_gradients = list(gradients((size,), 3))
    codebook.cache_clear()
    torch.set_default_dtype(default)
    try:
        for parameter.grad in all_gradients:
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(parameter, want)


@pytest.mark.parametrize("shape", [(5000,), (8, 4, 257)])
def test_a_state_at_rest_takes_two_bytes_and_a_scale_for_each_block(shape):
    parameter, optimizer = stepped("AdamW8bit", shape)
    state = optimizer.state[parameter]
    assert state["exp_avg"].shape == parameter.shape
    num_bytes = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    assert num_bytes == 2 * parameter.numel() + 2 * 4 * -(-parameter.numel() // 256)


def test_parameters_that_are_not_contiguous_or_not_float32(kernel):
    torch.manual_seed(0)
    values, g = torch.randn(80, 64), torch.randn(64, 80)
    forms = values.t().contiguous(), values.t(), values.t().contiguous().bfloat16()
    plain, turned, half = parameters = [nn.Parameter(form) for form in forms]
    for p in parameters:
        p.grad = g.to(p.dtype)
        AdamW8bit([p], lr=1e-2).step()
    assert not turned.is_contiguous()
    assert torch.equal(plain, turned)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), plain, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_keeps_codes_and_scales(dtype):
    parameter, optimizer = stepped("AdamW8bit", 5000, 2, dtype)
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    twin = nn.Parameter(parameter.detach().clone())
    other = AdamW8bit([twin], lr=1e-2)
    other.load_state_dict(torch.load(stream, weights_only=True))
    state, loaded = optimizer.state[parameter], other.state[twin]
    assert loaded.pop("step") == state["step"]
    assert all(torch.equal(one, state[key]) and one.dtype == state[key].dtype for key, one in loaded.items())
    loaded["step"] = state["step"]
    go_on(parameter, optimizer, 2, seed=1)
    go_on(twin, other, 2, seed=1)
    assert torch.equal(parameter, twin)


def test_autograd_sees_that_a_step_changed_the_parameter(kernel):
    parameter = nn.Parameter(torch.randn(5120))
    parameter.grad = torch.randn(5120)
    loss = (parameter**2).sum()
    AdamW8bit([parameter]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_learning_rate_can_be_a_tensor():
    (one, _), (other, _) = (stepped("AdamW8bit", 5000, 3, lr=lr) for lr in (torch.tensor(0.5), 0.5))
    assert torch.equal(one, other)


def test_a_sparse_gradient_is_refused():
    layer = nn.Embedding(100, 64, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="expected a dense, real gradient"):
        AdamW8bit(layer.parameters()).step()


@pytest.mark.long_where(kernel=["numba"], name=[name for name in KINDS if name not in COMPILED])
@pytest.mark.parametrize("name", KINDS)
def test_a_nan_reaches_the_parameter(name, kernel):
    """No silent repair: the block that it is in becomes NaN, no other does."""
    parameter, optimizer = stepped(name, 5000, 0)
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
    monkeypatch.setattr("zeroshard.optim.eightbit.step._has_numba", lambda: False)
    parameter, optimizer = stepped(name, 5000)
    fail = mock.Mock(side_effect=RuntimeError("no memory"))
    monkeypatch.setattr("zeroshard.optim.eightbit.rules.take_step", fail)
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
        parameter, optimizer = stepped("AdamW8bit", 400_000, 2)
        results.append((parameter.detach(), optimizer.state[parameter]["exp_avg_sq"]))
    torch.set_num_threads(num_threads)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.parametrize("failing", [0, 500])
def test_an_error_in_any_thread_is_raised_when_all_have_ended(failing):
    ended = []

    def work(first, last):
        if first == failing:
            raise RuntimeError(f"blocks from {first}")
        ended.append(first)

    with mock.patch.object(torch, "get_num_threads", return_value=2), pytest.raises(RuntimeError) as error:
        over_threads(work, 1000)
    assert str(error.value) == f"blocks from {failing}"
    assert len(ended) == 1


# ------------------------------------------------------------------ bfloat16: rounded after a step in float32

CASES = (
    (4096, 0, False, 0.0),
    (5003, 256, False, 0.1),
    (70_001, 1023, False, 0.1),
    (255, 1, False, 0.1),
    (0, 0, False, 0.0),
    (300, 2, True, 0.1),
    (70_001, 5, True, 0.0),
)
"""(elements, place in the whole parameter, True for float32 states, weight decay)."""


@pytest.mark.long_where(kernel=["torch"])
@pytest.mark.long_where(name=[name for name in ROUNDED if name != "SGD"])  # numba compiles others for longer
@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_and_states_have_the_bits_of_a_step_in_float32_rounded_afterwards(name, kernel):
    rule = RULES[name]
    for size, start, is_exact, weight_decay in CASES:
        p, states = begin(rule, size, torch.bfloat16, is_exact=is_exact)
        q, others = begin(rule, size, torch.bfloat16, is_exact=is_exact)
        first = p.clone()
        for step, g in enumerate(hard_gradients(size, torch.bfloat16), 1):
            numbers = numbers_of(name, step, weight_decay=weight_decay)
            bits, before, version = Bits(Rounding(7, step).key(name), start), g.clone(), p._version
            take_step(rule, p, g, states, numbers, bits)
            step_plainly(rule, q, before, others, numbers, bits)
            assert not differences(p, g, states, q, before, others)
            assert p._version > version or not size, "replicated parameters follow changes by it"
        assert not size or (p != first).sum() > size / 2
        assert size < 5000 or 0 < p.isnan().sum() < size


def test_a_gradient_of_float32_is_not_rounded(kernel):
    p, states = begin(SGD, 5003, torch.bfloat16)
    q, others = begin(SGD, 5003, torch.bfloat16)
    numbers, g = numbers_of("SGD", 1), torch.randn(5003)
    take_step(SGD, p, g, states, numbers, Bits(3, 256))
    step_plainly(SGD, q, g, others, numbers, Bits(3, 256))
    assert not differences(p, g, states, q, g, others)
