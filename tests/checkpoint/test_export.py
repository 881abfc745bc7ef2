"""What is exported, by the command or by the engine, is what transformers loads: every bit of it."""

from __future__ import annotations

import copy
import json
import os
import shutil
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.checkpoint.damage import full_after
from tests.checkpoint.peaks import SLACK, growth, needs_linux
from tests.commands import failure
from tests.distributed.models import LLAMA, VOCABULARY, Tiny, small_llama
from tests.distributed.training import numbers, start, step, take_steps, token_loss, tokens
from tests.ranks import on_ranks
from zeroshard.checkpoint.manifest import saved_names
from zeroshard.cli.main import main
from zeroshard.lazy.deferred import values_of

transformers = pytest.importorskip("transformers")
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, load_model  # noqa: E402

BERT = {key: LLAMA[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
T5 = {"d_model": 24, "d_kv": 12, "d_ff": 40, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 64}
KINDS = {
    "Llama": ("AutoModelForCausalLM", LLAMA),
    "GPT2": ("AutoModelForCausalLM", GPT2),  # embedding and head are tied
    "T5": ("AutoModelForSeq2SeqLM", T5 | {"decoder_start_token_id": 0}),  # and two embeddings
    "Mixtral": ("AutoModelForCausalLM", LLAMA | {"num_local_experts": 4}),
    "Bert": ("AutoModelForMaskedLM", BERT | {"intermediate_size": 40}),  # and a bias
}


def small_model(kind: str) -> nn.Module:
    auto_class, sizes = KINDS[kind]
    torch.manual_seed(1)
    return getattr(transformers, auto_class).from_config(getattr(transformers, f"{kind}Config")(**sizes))


def answer(model: nn.Module) -> torch.Tensor:
    """Logits [2, 17, VOCABULARY], those of an encoder-decoder included."""
    batch = tokens(7, rank=0)
    return model.eval()(input_ids=batch, labels=batch).logits


def labelled_loss(model: nn.Module, number: int) -> torch.Tensor:
    batch = tokens(number)
    return model(input_ids=batch, labels=batch).loss


class Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


def train_and_save(folder: str, kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The whole state_dict and the logits of a model; a checkpoint and two exports are in `folder`."""
    engine, _ = start(small_model(kind), stage=3)
    take_steps(engine, range(2), labelled_loss)
    engine.save_checkpoint(Path(folder, "checkpoint"))
    engine.save_pretrained(Path(folder, "engine"), Tokenizer())
    engine.save_pretrained(Path(folder, "small"), dtype="bf16", max_shard_bytes=10_000)
    with torch.no_grad():
        return engine.full_state_dict(), answer(engine)


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    @cache
    def of(kind: str) -> tuple[Path, dict[str, torch.Tensor], torch.Tensor]:
        folder = tmp_path_factory.mktemp(kind)
        return folder, *ranks(2, train_and_save, str(folder), kind, timeout=200)[0]

    return of


def load(kind: str, folder: Path, **options) -> nn.Module:
    """What transformers loads; nothing is missing, and nothing was there that it does not know."""
    auto_class = getattr(transformers, KINDS[kind][0])
    model, report = auto_class.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model


def assert_equal(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in state.items():
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.long_where(kind=["GPT2", "T5", "Mixtral", "Bert"])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_what_was_trained_to_the_bit(trained, tmp_path, kind):
    folder, state, logits = trained(kind)
    assert main(["export", str(folder / "checkpoint"), str(tmp_path)]) == 0
    for exported in (tmp_path, folder / "engine"):
        model = load(kind, exported)
        assert_equal(model.state_dict(), state)
        assert len(list(model.parameters())) == len(list(small_model(kind).parameters()))  # tied as before
        with torch.no_grad():
            assert torch.equal(answer(model), logits)
        assert model.config.architectures == [type(model).__name__]
        assert model.dtype == torch.float32
        assert (exported / "generation_config.json").exists() == model.can_generate()
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (folder / "engine" / name).read_bytes()
    assert (folder / "engine" / "tokenizer.json").exists()
    own = zeroshard.from_pretrained(getattr(transformers, KINDS[kind][0]), tmp_path)
    assert_equal({name: values_of(value) for name, value in own.state_dict(keep_vars=True).items()}, state)


@pytest.mark.parametrize("kind", ["Llama"])
def test_files_are_cut_and_values_cast_as_asked(trained, tmp_path, kind):
    folder, state, _ = trained(kind)
    size = ["--dtype", "bf16", "--max-shard-size", "10KB"]
    assert main(["export", str(folder / "checkpoint"), str(tmp_path), *size, "--no-verify"]) == 0
    for exported in (tmp_path, folder / "small"):
        model = load(kind, exported)
        assert json.loads((exported / "config.json").read_text())["dtype"] == "bfloat16"
        assert model.dtype == torch.bfloat16
        assert_equal(model.state_dict(), {name: value.to(model.dtype) for name, value in state.items()})
        index = json.loads((exported / "model.safetensors.index.json").read_text())
        files = sorted(exported.glob("*.safetensors"))
        assert {file.name for file in files} == set(index["weight_map"].values())
        assert files[-1].name == f"model-{len(files):05}-of-{len(files):05}.safetensors"
        tensors = [load_file(file) for file in files]
        sizes = [[tensor.nbytes for tensor in held.values()] for held in tensors]
        assert all(sum(held) <= 10_000 or len(held) == 1 for held in sizes)
        assert sum(map(sum, sizes)) == index["metadata"]["total_size"]
        with safe_open(files[0], "pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_a_new_export_leaves_nothing_of_the_one_before(trained, tmp_path):
    checkpoint = str(trained("Llama")[0] / "checkpoint")
    listings = []
    for size in ("10KB", "5GB", "20KB"):
        assert main(["export", checkpoint, str(tmp_path), "--max-shard-size", size]) == 0
        assert_equal(load("Llama", tmp_path).state_dict(), trained("Llama")[1])
        listings.append({file.name for file in tmp_path.iterdir()})
    configs = {"config.json", "generation_config.json"}
    assert listings[1] == configs | {"model.safetensors"}
    assert "model.safetensors" not in listings[2]
    shards = listings[2] - configs - {"model.safetensors.index.json"}
    assert all(name.endswith(f"-of-{len(shards):05}.safetensors") for name in shards)


NAMES = {"tied": {"head": "embed", "decoder": "embed"}}


@pytest.mark.parametrize(
    ("model", "names", "expected"),
    [
        (NAMES, ["norm"], ["norm"]),
        (NAMES, ["embed", "decoder", "head"], ["embed"]),
        (NAMES, ["decoder", "embed", "head"], ["embed"]),  # transformers ties to this one
        (NAMES, ["decoder", "head"], ["decoder"]),
        ({"tied": {}}, ["embed", "head"], ["embed", "head"]),  # the user tied them: transformers will not
        ({}, ["embed", "head"], ["embed"]),  # not of transformers
        (NAMES | {"not_saved": ["positions"]}, ["positions"], []),
    ],
)
def test_a_parameter_is_written_under_the_names_that_are_not_tied_again(model, names, expected):
    assert saved_names(model, names) == expected


# -------------------------------------------------------------------------------- other kinds of models


class Mixed(nn.Module):
    """Dtypes and shapes of all sorts, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = Tiny()
        self.again = self.tiny
        self.frozen = nn.Linear(3, 5).bfloat16().requires_grad_(False)
        self.norm = nn.BatchNorm1d(7)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.zeros(9), persistent=False)

    def forward(self, x):
        return self.tiny(self.norm(x)).square().mean() * self.scale + self.empty.sum()


def train_mixed(folder: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    engine, _ = start(Mixed(), stage=3)
    engine.backward(engine(numbers(0, 5, 7)))
    engine.step()
    engine.save_checkpoint(Path(folder, "checkpoint"))
    engine.save_pretrained(Path(folder, "engine"))
    state = engine.full_state_dict()
    return {name: value.to(engine.state_dict()[name].dtype) for name, value in state.items()}


def test_a_model_of_ones_own_is_exported_as_weights(ranks, tmp_path):
    expected, _ = ranks(2, train_mixed, str(tmp_path))
    exported = tmp_path / "command"
    assert main(["export", str(tmp_path / "checkpoint"), str(exported)]) == 0
    for folder in (exported, tmp_path / "engine"):
        assert [file.name for file in folder.iterdir()] == ["model.safetensors"]
        model = Mixed()
        load_model(model, folder / "model.safetensors")
        assert_equal(model.state_dict(), expected)


def with_adapters() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = get_peft_model(small_model("Llama"), lora)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM"))
    return model


def train_adapters(folder: str) -> dict[str, torch.Tensor]:
    engine, _ = start(with_adapters(), stage=3)
    take_steps(engine, range(2), labelled_loss)
    engine.save_checkpoint(Path(folder, "checkpoint"))
    engine.save_pretrained(Path(folder, "engine"), Tokenizer())
    engine.save_pretrained(Path(folder, "merged"), merge_adapters=True)
    state = engine.full_state_dict()
    engine.module.delete_adapter("second")
    with pytest.raises(RuntimeError, match="is sharded, and its layer was taken out of the model"):
        engine.save_pretrained(Path(folder, "left"))
    return state


@on_ranks(2)
def test_adapters_that_peft_does_not_merge_are_an_error_on_all_ranks(tmp_path):
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[1], task_type="CAUSAL_LM")
    engine, _ = start(get_peft_model(small_model("Llama"), lora), stage=3)
    with pytest.raises(RuntimeError, match="does not support merging"):
        engine.save_pretrained(tmp_path / "merged", merge_adapters=True)
    engine.save_pretrained(tmp_path / "adapters")
    assert os.listdir(tmp_path / "merged") == []
    assert (tmp_path / "adapters" / "adapter_config.json").exists()


def test_of_a_model_with_adapters_peft_loads_those_or_the_whole_as_peft_merges_it(ranks, tmp_path, capsys):
    peft = pytest.importorskip("peft")
    state, _ = ranks(2, train_adapters, str(tmp_path))
    merged = with_adapters()
    merged.load_state_dict(state)
    assert_equal(load("Llama", tmp_path / "merged").state_dict(), merged.merge_and_unload().state_dict())
    model = peft.PeftModel.from_pretrained(small_model("Llama"), tmp_path / "engine")
    model.load_adapter(tmp_path / "engine" / "second", "second")
    assert_equal(model.state_dict(), state)
    size = (tmp_path / "engine" / "adapter_model.safetensors").stat().st_size
    assert size < sum(value.nbytes for value in state.values()) / 2
    assert (tmp_path / "engine" / "tokenizer.json").exists()
    assert not (tmp_path / "left").exists()
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "command")]) == 2
    assert "call engine.save_pretrained()" in capsys.readouterr().err


TIED = {
    "rows": {"trainable_token_indices": [1, 4]},
    "rows of the head": {"trainable_token_indices": {"lm_head": [1, 4]}},
    "copy of both": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
}
"""Adapters of a model whose embedding and head share a weight."""
UNMERGED = {
    "rows of the head": "adapters ('base_model.model.lm_head.token_adapter.trainable_tokens_delta.default')",
    "embedding": "embed_tokens.base_layer.weight', and adapters ('base_model.model.model.embed_tokens')",
}
"""Of adapters that the weight cannot take in, a part of the error."""


tied_base = partial(small_llama, tie_word_embeddings=True)


def tied(how: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    options = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return get_peft_model(tied_base(), LoraConfig(**copy.deepcopy(options | TIED[how])))


def train_tied(folder: str, kinds: list[str]) -> dict[str, tuple]:
    """The state_dict of each model, and the refusals of merged adapters; exports are in `folder`."""
    ends = {}
    for how in kinds:
        engine, _ = start(tied(how), "SGD", stage=3)
        take_steps(engine, range(2), labelled_loss)
        engine.save_pretrained(Path(folder, how, "adapters"))
        refusals = []
        try:
            list(engine.named_full_parameters(merge_adapters=True))
        except ValueError as error:
            refusals.append(str(error))
        try:
            engine.save_pretrained(Path(folder, how, "merged"), merge_adapters=True)
        except ValueError as error:
            refusals.append(str(error))
        ends[how] = engine.full_state_dict(), refusals
        engine.close(restore=False)
    return ends


SOME_TIED = ["rows of the head", "copy of both"]


@pytest.mark.parametrize("kinds", [SOME_TIED, pytest.param([*TIED], marks=pytest.mark.long)])
def test_adapters_of_a_tied_weight_are_written_as_they_were_trained_or_refused(ranks, tmp_path, kinds):
    peft = pytest.importorskip("peft")
    ends, others = ranks(2, train_tied, str(tmp_path), kinds)
    for how, (state, refusals) in ends.items():
        folder = tmp_path / how
        plain = tied(how)
        plain.load_state_dict(state)
        plain.save_pretrained(folder / "plain")
        written = [load_file(folder / one / "adapter_model.safetensors") for one in ("adapters", "plain")]
        assert_equal(*written)
        models = [peft.PeftModel.from_pretrained(tied_base(), folder / "adapters")]
        if how in UNMERGED:
            assert [UNMERGED[how] in text for text in (*refusals, *others[how][1])] == [True] * 4
            assert not (folder / "merged").exists()
        else:
            assert not refusals
            models.append(load("Llama", folder / "merged"))
            config = json.loads((folder / "merged" / "config.json").read_text())
            assert config["tie_word_embeddings"] == (how in ("rows", "copy of both"))
        for model in models:
            torch.testing.assert_close(answer(model), answer(plain), rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------ memory and errors

MEGABYTE = 1 << 20


@pytest.mark.long
@needs_linux
@on_ranks(1)
def test_an_export_holds_a_unit_or_a_tensor_at_a_time(tmp_path):
    """Exports of a model of 16 units of 2 MB."""
    model = nn.Sequential(*(nn.Linear(1024, 511) for _ in range(16)))
    engine, _ = start(model, "SGD", stage=3, units="Linear")
    engine.save_checkpoint(tmp_path / "checkpoint")
    command = ["export", str(tmp_path / "checkpoint"), str(tmp_path / "command")]
    for export, *arguments in ((engine.save_pretrained, tmp_path / "engine"), (main, command)):
        export(*arguments)  # what is allocated once is
        assert growth(export, *arguments, times=3) <= 2 * MEGABYTE + SLACK
    assert (tmp_path / "command" / "model.safetensors").stat().st_size > 31 * MEGABYTE


def export_in_vain(folder: str) -> list[str]:
    """What an engine says to exports that fail; it trains on."""
    model = small_model("Llama")
    engine, optimizer = start(model, stage=3)
    engine.save_pretrained(Path(folder, "there"))
    before, said = engine.full_state_dict(), []
    for path, tokenizer in (("there", None), ("file", None), ("new", Broken())):
        try:
            with full_after(20_000 if path == "there" and dist.get_rank() == 0 else -1):
                engine.save_pretrained(Path(folder, path), tokenizer)
        except RuntimeError as error:
            said.append(str(error))
    assert_equal(engine.full_state_dict(), before)
    step(engine, optimizer, token_loss, 0)
    return said


class Broken:
    def save_pretrained(self, folder: str) -> None:
        raise KeyError("vocabulary")


def test_an_export_that_fails_on_rank_0_fails_on_all_and_training_goes_on(ranks, tmp_path):
    (tmp_path / "file").touch()
    said, other = ranks(2, export_in_vain, str(tmp_path))
    assert other == said
    there, file, new = said
    assert "File too large" in there
    assert "model.safetensors" in there
    assert str(tmp_path / "file") in file
    assert "KeyError: 'vocabulary'" in new
    assert {path.name for path in (tmp_path / "there").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors")
    }
    assert_equal(load("Llama", tmp_path / "there").state_dict(), small_model("Llama").state_dict())


def test_a_damaged_checkpoint_is_not_exported(trained, tmp_path, capsys):
    shutil.copytree(trained("Llama")[0] / "checkpoint", tmp_path / "checkpoint")
    file = max(tmp_path.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    code, said = failure(capsys, "export", tmp_path / "checkpoint", tmp_path / "out")
    assert code == 1
    assert str(file) in said
    assert not (tmp_path / "out").exists()
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "out"), "--no-verify"]) == 0
