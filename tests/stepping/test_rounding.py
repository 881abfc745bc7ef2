"""Stochastic rounding against integers of Python, and against what follows from its definition."""

import hashlib

import pytest
import torch

from zeroshard.stepping.rounding import Rounding, random_bits, round_into

KEY = 0x9D39247E33776D41


def splitmix64(state):
    """The outputs of Steele, Lea, Flood 2014, figure 17."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


def lanes(words):
    return [(word >> shift) % 2**16 for word in words for shift in (0, 16, 32, 48)]


def rounded(values, key=KEY, start=0):
    out = torch.empty(values.shape, dtype=torch.bfloat16)
    round_into(out, values, key, start)
    return out


def words_of(values):
    """The bits of bfloat16 as numbers."""
    return values.view(torch.int16).int() & 0xFFFF


@pytest.mark.parametrize("key", [0, 1, KEY, 2**63, 2**64 - 1])
def test_the_random_bits_of_any_range_follow_from_the_key_and_the_element(key):
    """The numbers for 1234567 are published by others."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert random_bits(1234567, 0, 16).tolist() == lanes(published)
    words = splitmix64(key)
    want = lanes(next(words) for _ in range(300))
    for start, num in ((0, 1200), (256, 600), (1, 2), (3, 6), (1199, 1), (5, 0)):
        assert random_bits(key, start, num).tolist() == want[start : start + num]
    far = 4 * 10**12 + 3
    words = splitmix64((key + 10**12 * 0x9E3779B97F4A7C15) % 2**64)
    assert random_bits(key, far, 5).tolist() == lanes([next(words), next(words)])[3:]


def test_a_key_is_a_hash_of_seed_step_and_name_and_differs_with_each():
    digest = hashlib.blake2b(b"7:3:layers.0.weight", digest_size=8).digest()
    assert Rounding(7, 3).key("layers.0.weight") == int.from_bytes(digest, "little")
    cases = [(Rounding(7, 3), "a"), (Rounding(8, 3), "a"), (Rounding(7, 4), "a"), (Rounding(7, 3), "b")]
    bits = [random_bits(rounding.key(name), 0, 1 << 16) for rounding, name in cases]
    for number, one in enumerate(bits):
        for other in bits[:number]:
            assert (one == other).sum() < 20  # of 65536 that agree with a chance of 1/65536 each


def test_every_bfloat16_stays_as_it_is_and_nan_stays_nan():
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    is_nan = every.isnan()
    assert is_nan.sum() == 2 * 127
    for key in range(8):
        result = rounded(every.float(), key)
        assert torch.equal(words_of(result)[~is_nan], words_of(every)[~is_nan])
        assert result[is_nan].isnan().all()


def test_infinities_and_every_payload_of_nan_stay_whatever_the_bits():
    payloads = [1, 0x7F, 0xFFFF, 0x10000, 0x3FFFFF, 0x400000, 0x7FFFFF]
    words = [sign | 0x7F800000 | payload for sign in (0, 1 << 31) for payload in payloads]
    values = torch.tensor([word - 2**32 * (word >> 31) for word in words], dtype=torch.int32).view(
        torch.float32
    )
    assert rounded(values.repeat(1000)).isnan().all()
    infinite = torch.tensor([float("inf"), -float("inf")]).repeat(1000)
    assert torch.equal(rounded(infinite), infinite.bfloat16())


def test_values_round_as_numbers_of_python_do():
    """Words of float32 plus 16 bits of SplitMix64, at any place in the whole parameter."""
    values = (
        torch.randn(1000, generator=torch.Generator().manual_seed(2))
        * 10.0 ** torch.arange(-40, 40).repeat(13)[:1000]
    )
    values[::50] = 0
    words = splitmix64(KEY)
    bits = lanes(next(words) for _ in range(300))
    for start in (0, 1, 2, 3, 150):
        pairs = zip(values.view(torch.int32).tolist(), bits[start:], strict=False)
        want = [((word % 2**32 + bit) >> 16) % 2**16 for word, bit in pairs]
        assert words_of(rounded(values, start=start)).tolist() == want


def test_a_slice_is_rounded_as_it_is_in_the_whole_also_over_chunks():
    values = torch.randn((1 << 18) + 700, generator=torch.Generator().manual_seed(0))
    whole = rounded(values)
    for start, stop in ((256, 1024), (768, 1 << 18), ((1 << 17) - 256, len(values)), (512, 512), (5, 9)):
        assert torch.equal(rounded(values[start:stop], start=start), whole[start:stop])


def test_values_round_to_their_neighbours_and_are_right_on_average():
    values = torch.randn(1 << 14, generator=torch.Generator().manual_seed(1)).abs() + 0.01
    below = (values.view(torch.int32) & ~0xFFFF).view(torch.float32)
    spacing = ((values.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32) - below
    share, num = ((values - below) / spacing).double(), 400
    total = torch.zeros(len(values), dtype=torch.float64)
    for step in range(num):
        result = rounded(values, Rounding(0, step).key("weight")).float()
        up = (result - below) / spacing
        assert ((up == 0) | (up == 1)).all()
        total += up
    deviation = (total - num * share) / (num * share * (1 - share)).sqrt().clamp(min=1)
    assert deviation.abs().max() < 6  # standard deviations, of 16384 elements over the steps
    assert deviation.mean().abs() < 5 / 128
    assert deviation.square().mean() == pytest.approx(1, abs=0.1)
