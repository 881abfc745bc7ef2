"""from_pretrained: what transformers loads, with each rank reading its own part."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.checkpoint.peaks import growth, needs_linux
from tests.distributed.models import LLAMA, VOCABULARY
from tests.distributed.training import SOME_STAGES, plain, replicate, start, step, token_loss
from tests.ranks import on_ranks
from zeroshard import Config
from zeroshard.assemble import shard_over
from zeroshard.codec import DamageError
from zeroshard.comm.collectives import Axis
from zeroshard.comm.mesh import Axes
from zeroshard.lazy.deferred import is_stored, values_of
from zeroshard.parallel.tensor.division import Division
from zeroshard.plan.units import find_units
from zeroshard.safetensors import find_tensors

transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel  # noqa: E402


def llama(cls=LlamaForCausalLM, **options):
    torch.manual_seed(1)
    return cls(LlamaConfig(**LLAMA, **options))


def save(folder: Path, model, **how) -> Path:
    model.save_pretrained(folder, **how)
    return folder


def values(model) -> dict[str, torch.Tensor]:
    return {name: values_of(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}


def assert_same(model, expected) -> None:
    assert model.training == expected.training
    got, want = values(model), expected.state_dict()
    assert got.keys() == want.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}")
    for (name, buffer), (_, other) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(values_of(buffer), other), name


@pytest.mark.long_where(saved=[torch.float32], dtype=[torch.bfloat16, "float32"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, "float32"])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_values_and_dtypes_are_those_of_transformers(tmp_path, dtype, saved):
    save(tmp_path, llama(tie_word_embeddings=True).to(saved), max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model = zeroshard.from_pretrained(AutoModelForCausalLM, tmp_path, {"stage": 3}, dtype=dtype)
    assert all(parameter.is_meta and is_stored(parameter) for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(model, LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype))


def test_experts_that_transformers_stacks_are_stacked(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    save(tmp_path, MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=4)))
    model = zeroshard.from_pretrained(AutoModelForCausalLM, tmp_path)
    assert all(is_stored(parameter) for parameter in model.parameters())
    assert_same(model, MixtralForCausalLM.from_pretrained(tmp_path))


def test_missing_weights_are_initialized_and_reported_as_unexpected_ones_are(tmp_path, caplog, monkeypatch):
    file = save(tmp_path, llama(LlamaModel)) / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"stranger": torch.zeros(3)}, file, metadata={"format": "pt"})
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = zeroshard.from_pretrained(LlamaForCausalLM, tmp_path)
    assert "lm_head.weight" in caplog.text
    assert "stranger" in caplog.text
    state = values(model)
    assert torch.equal(state["model.norm.weight"], tensors["norm.weight"])
    assert state["lm_head.weight"].std().item() == pytest.approx(0.02, rel=0.1)


def refusal(path, cls=AutoModelForCausalLM, word="expect", **options) -> str:
    with pytest.raises((ValueError, DamageError), match=word) as caught:
        zeroshard.from_pretrained(cls, path, **options)
    return str(caught.value)


def test_what_is_no_safetensors_checkpoint_of_the_model_is_refused(tmp_path):
    assert "nothing is downloaded" in refusal("meta-llama/Llama-3.2-1B")
    (tmp_path / "pytorch_model.bin").touch()
    assert "is a pickle" in refusal(tmp_path)
    save(tmp_path, llama())
    assert refusal(tmp_path, hidden_sise=3).startswith(
        "from_pretrained: expected fields of LlamaConfig, got {'hidden_sise': 3}. Every rank reads its own"
    )
    expected = f"has shape ({VOCABULARY}, 24); the model expects ({VOCABULARY + 1}, 24)"
    said = refusal(tmp_path, vocab_size=VOCABULARY + 1)
    assert said == f"'{tmp_path}': parameter 'lm_head.weight' {expected}"
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert f"{file}: expected {file.stat().st_size + 4} bytes, found" in refusal(tmp_path)
    file.write_bytes(b"\xff" * 20)
    assert f"{file}: expected {8 + (1 << 64) - 1} bytes, found 20" in refusal(tmp_path)


def write_tensors(file: Path, header: object) -> None:
    """A safetensors file of 64 bytes of tensors."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))


SOUND = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
CHANGES = [{"shape": shape} for shape in ([-1, -2], [True, 2], [1 << 62, 4])]
CHANGES += [{"data_offsets": at} for at in ([-8, 0], [False, 8], [60, 68], [1 << 70, (1 << 70) + 8])]
CHANGES += [{"shape": [True], "data_offsets": [False, 4]}, {"dtype": "X"}]


def test_a_crafted_header_is_one_error_that_names_the_file(tmp_path):
    write_tensors(tmp_path / "model.safetensors", {"a": SOUND})
    assert find_tensors(tmp_path)["a"].shape == (2,)
    long_number = b'{"a": ' + b"1" * 5000 + b"}"
    for header in (
        *([], None, b"[" * 100_000, long_number, b'{"\xff": 1}', {"a": 1}),
        *({"a": SOUND | change} for change in CHANGES),
    ):
        write_tensors(tmp_path / "model.safetensors", header)
        assert f"{tmp_path / 'model.safetensors'}: " in refusal(tmp_path)


def test_a_crafted_index_is_one_error_that_names_it_and_reaches_no_other_folder(tmp_path):
    folder, index = tmp_path / "folder", tmp_path / "folder" / "model.safetensors.index.json"
    folder.mkdir()
    for file in (tmp_path / "outside", folder / "inside"):
        write_tensors(file, {"a": SOUND})
    index.write_text(json.dumps({"weight_map": {"a": "inside"}}))
    assert find_tensors(folder)["a"].file == folder / "inside"
    outside = ("../outside", str(tmp_path / "outside"), "./inside", "", ".", "..", "a\0b", "\ud800")
    contents = [{"weight_map": {"a": name}} for name in (*outside, 1, None, ["x"])]
    for content in (*contents, {}, [], None, {"weight_map": [1]}, {"weight_map": None}):
        index.write_text(json.dumps(content))
        assert f"{index}: " in refusal(folder)
    for text in (b"{", b"\xff", b"[" * 100_000, b""):
        index.write_bytes(text)
        assert f"{index}: " in refusal(folder)
    index.write_text(json.dumps({"weight_map": {"a": "missing"}}))
    assert f"{folder / 'missing'}: " in refusal(folder, word="expected a file, found none")


@pytest.mark.long_where(stage=[0, 1])
@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 0), (2, 3), (4, 1)])
@on_ranks()
def test_training_goes_on_as_in_plain_pytorch(tmp_path, num_ranks, stage):
    if dist.get_rank() == 0:
        save(tmp_path, llama())
    dist.barrier()
    torch.manual_seed(dist.get_rank())
    model = zeroshard.from_pretrained(LlamaForCausalLM, tmp_path, {"stage": stage})
    engine, optimizer = start(model, "AdamW", stage=stage)
    other = replicate(LlamaForCausalLM.from_pretrained(tmp_path))
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    losses = [step(engine, optimizer, token_loss, number) for number in range(2)]
    expected = [step(other, other_optimizer, token_loss, number) for number in range(2)]
    assert losses == pytest.approx(expected, abs=1e-5)
    if num_ranks <= 2:
        assert losses == expected
        wanted = plain(other).state_dict()
        assert all(torch.equal(value, wanted[name]) for name, value in engine.full_state_dict().items())


NUM_RANKS, RANK = 8, 3


class Alone(Axis):
    def broadcast(self, tensor, label):
        pass


def load_as_one_of_many(folder: str) -> tuple[int, int, int]:
    """The growth of peak memory, and the bytes of a shard and of the largest parameter."""
    axis = Alone(None, device=torch.device("cpu"), timeout_s=10)
    sizes, config = list[int](), Config()
    zeroshard.from_pretrained(LlamaForCausalLM, folder)  # imports all that it needs
    axis.rank, axis.size = RANK, NUM_RANKS

    def load() -> None:
        model = zeroshard.from_pretrained(LlamaForCausalLM, folder, config)
        sizes[:] = (parameter.numel() * 4 for parameter in model.parameters())
        division = Division([], find_units(model, config.units))
        shard_over(model, division, config, Axes.of_one_group(None, axis))

    return growth(load, times=3), sum(sizes) // NUM_RANKS, max(sizes)


@pytest.mark.long
@needs_linux
def test_a_rank_holds_no_more_than_its_shard_and_a_tensor_while_it_reads(ranks, tmp_path):
    shape = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6, "vocab_size": 4096}
    save(tmp_path, LlamaForCausalLM(LlamaConfig(**LLAMA | shape)))
    [(grown, shard, largest)] = ranks(1, load_as_one_of_many, str(tmp_path), process_group=False)
    assert grown <= 1.5 * shard + largest


@on_ranks(2)
def test_all_stages_begin_with_what_narrower_main_parameters_hold(tmp_path):
    """Main parameters in bfloat16 of a float32 file, computed with in float32."""
    if dist.get_rank() == 0:
        save(tmp_path, llama())
    dist.barrier()
    rounded = LlamaForCausalLM.from_pretrained(tmp_path).bfloat16().float()
    for stage in SOME_STAGES:
        config = {"stage": stage, "precision": {"main_dtype": "bf16"}}
        engine, _ = start(zeroshard.from_pretrained(LlamaForCausalLM, tmp_path, config), "SGD", **config)
        assert token_loss(engine, 0).item() == token_loss(rounded, 0).item()
