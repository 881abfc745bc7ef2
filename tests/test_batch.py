"""Batches on their way to a device. The meta device stands for an accelerator."""

import copy
from collections import OrderedDict, UserDict, defaultdict, namedtuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from zeroshard.data.loader import EpochLoader
from zeroshard.data.microbatch import to_device

META, CPU = torch.device("meta"), torch.device("cpu")

Pair = namedtuple("Pair", "first second")


class Scaled(dict):
    """A mapping with more than its items."""

    scale = 1.0


def x():
    return torch.arange(6).view(2, 3)


@pytest.mark.parametrize(
    ("batch", "find"),
    [
        (x(), lambda b: b),
        ((x(), 1, "a", None), lambda b: b[0]),
        ([x(), [x()]], lambda b: b[1][0]),
        (Pair(0, x()), lambda b: b.second),
        ({"a": {"b": (x(),)}}, lambda b: b["a"]["b"][0]),
        (OrderedDict(a=x()), lambda b: b["a"]),
        (defaultdict(list, a=x()), lambda b: b["a"]),
        (UserDict(a=x()), lambda b: b["a"]),
        (pack_sequence([torch.ones(3), torch.ones(2)]), lambda b: b.data),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_batch_on_a_device_has_the_types_and_shapes_of_the_batch(batch, find):
    before = find(batch)
    moved = to_device(batch, META)
    assert type(moved) is type(batch)
    assert find(moved).device == META
    assert (find(moved).shape, find(moved).dtype) == (before.shape, before.dtype)
    assert find(batch) is before
    assert before.device == CPU


def test_what_is_no_tensor_is_handed_on():
    batch = (3, "text", None, object(), Scaled, {1, 2})
    assert to_device(batch, META) == batch
    scaled = Scaled(a=x())
    scaled.scale = 0.5
    assert to_device(scaled, META).scale == 0.5
    # torch reads the sizes of a packed sequence on the CPU.
    assert to_device(pack_sequence([torch.ones(2)]), META).batch_sizes.device == CPU
    lists = {"a": (x(), [x()])}
    before = copy.copy(lists)
    assert to_device(lists, CPU) is lists
    assert lists["a"][0] is before["a"][0]


def test_encodings_and_outputs_of_transformers_keep_their_types():
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": x()}, encoding=None, n_sequences=2)
    moved = to_device(encoding, META)
    assert type(moved) is transformers.BatchEncoding
    assert moved.input_ids.device == META
    assert moved.n_sequences == 2
    assert encoding.input_ids.device == CPU
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.ones(2))
    assert to_device(output, META).last_hidden_state.device == META
    assert output.last_hidden_state.device == CPU


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")  # there is no accelerator to pin for
def test_a_loader_hands_out_batches_on_its_device_and_counts_them_as_on_the_cpu():
    data = [(torch.tensor([float(i)]), i) for i in range(10)]
    on_cpu = EpochLoader(data, rank=1, num_ranks=2, batch_size=2)
    on_device = EpochLoader(data, rank=1, num_ranks=2, device=META, batch_size=2)
    assert (on_cpu.pin_memory, on_device.pin_memory) == (False, True)
    for batch, other in zip(on_cpu, on_device, strict=True):
        assert [t.device for t in batch] == [CPU, CPU]
        assert [t.device for t in other] == [META, META]
        assert on_cpu.state_dict() == on_device.state_dict()


@pytest.mark.gpu
def test_a_loader_of_a_gpu_pins_batches_and_hands_them_out_there():
    data = [(torch.tensor([float(i)]), i) for i in range(10)]
    loader = EpochLoader(data, rank=0, num_ranks=1, device=torch.device("cuda", 0), batch_size=2)
    wanted = EpochLoader(data, rank=0, num_ranks=1, batch_size=2)
    for batch, other in zip(loader, wanted, strict=True):
        assert all(value.is_cuda for value in batch)
        assert [value.tolist() for value in batch] == [value.tolist() for value in other]
