"""A DeepSpeed config, as a dict or a file, becomes a Config and one warning, or one error.

DeepSpeed's config keys as data: the keys of 0.19, and older keys that configs still have.

    MAPPED         the key means the same as one of zeroshard's
    IGNORED        not read, which the warning says: harmless, or given to `initialize`
    NO_EQUIVALENT  refused, with the nearest feature, unless the key is switched off

Keys are dotted.
"""

import difflib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from zeroshard.config import checked
from zeroshard.config.checked import REFUSED, ValueRule, read_file, show, with_type
from zeroshard.config.sections import Config
from zeroshard.internals.warn import warn_first

Options = dict[str, Any]
"""Values by zeroshard's dotted keys."""


class KeyRule(NamedTuple):
    """The values that a mapped key takes, and the options that they become."""

    rule: ValueRule
    options: Callable[[Any], Options]


# ---------------------------------------------------------------------------------------------- mapped

_BOOLEAN = checked.instance(bool, "true or false")
_AT_LEAST_0 = checked.number("a number >= 0", lambda value: 0 <= value < math.inf)


def _as(option: str, rule: ValueRule, *neutral: Any) -> KeyRule:
    """Return the rule of a key whose values, but for neutral ones, are those of an option."""
    return KeyRule(rule, lambda value: {} if value in neutral else {option: value})


def _flag(on: Options, off: Options | None = None) -> KeyRule:
    return KeyRule(_BOOLEAN, lambda is_on: on if is_on else off or {})


_RECOMPUTE = {"recompute": "unit"}
_DYNAMIC = "precision.loss_scale."
"""The prefix of the options for the adaptation of a dynamic scale to overflows."""

MAPPED: dict[str, KeyRule] = {
    "train_batch_size": _as("train_batch_size", checked.integer(1)),  # `translate` divides it
    "train_micro_batch_size_per_gpu": _as("micro_batch_size", checked.integer(1)),
    "gradient_accumulation_steps": _as("gradient_accumulation_steps", checked.integer(1)),
    "gradient_clipping": _as("clip_grad_norm", _AT_LEAST_0, 0),
    "communication_data_type": _as("precision.reduce_dtype", checked.DTYPE),
    "zero_optimization.stage": _as("stage", checked.integer(0, 3)),
    "zero_optimization.offload_optimizer.device": _as("offload.optimizer", checked.TIER, "none"),
    "zero_optimization.offload_optimizer.nvme_path": _as("offload.nvme_path", checked.PATH),
    "zero_optimization.offload_optimizer.ratio": KeyRule(
        checked.FRACTION, lambda ratio: {"offload.device_fraction": 1 - ratio}
    ),
    "zero_optimization.offload_param.device": _as("offload.parameters", checked.TIER, "none"),
    "zero_optimization.offload_param.nvme_path": _as("offload.nvme_path", checked.PATH),
    "zero_optimization.zero_hpz_partition_size": _as("reshard_after_forward", checked.integer(0), 0, 1),
    "zero_optimization.mics_shard_size": _as("shard_group_size", checked.integer(-1), -1, 0),
    "bf16.enabled": _flag({"precision.param_dtype": torch.bfloat16}),
    "bf16.check_grad_overflow": _flag({"nonfinite": "skip"}, {"nonfinite": "report"}),
    "bf16.bf16_master_weights_and_grads": _flag({"precision.main_dtype": torch.bfloat16}),
    "bf16.bf16_optimizer_states": _flag({"precision.main_dtype": torch.bfloat16}),
    "fp16.enabled": _flag({"precision.param_dtype": torch.float16}),
    "fp16.loss_scale": KeyRule(_AT_LEAST_0, lambda scale: {"precision.loss_scale": scale or "dynamic"}),
    "fp16.initial_scale_power": KeyRule(checked.integer(0), lambda power: {f"{_DYNAMIC}start": 2.0**power}),
    "fp16.loss_scale_window": _as(f"{_DYNAMIC}window", checked.integer(1)),
    "fp16.min_loss_scale": _as(f"{_DYNAMIC}minimum", _AT_LEAST_0, 0),
    "fp16.hysteresis": _as(f"{_DYNAMIC}hysteresis", checked.integer(1)),
    "data_types.param_dtype": _as("precision.param_dtype", checked.DTYPE),
    "activation_checkpointing.partition_activations": _flag(_RECOMPUTE),
    "activation_checkpointing.contiguous_memory_optimization": _flag(_RECOMPUTE),
    "activation_checkpointing.number_checkpoints": KeyRule(checked.integer(1), lambda _: _RECOMPUTE),
    "activation_checkpointing.cpu_checkpointing": _flag(_RECOMPUTE | {"offload.activations": "cpu"}),
    "compile.deepcompile": _flag({"compile": True}),
    "compile.enabled": _flag({"compile": True}),
    "tensor_parallel.autotp_size": _as("mesh.tp", checked.integer(0), 0, 1),
    # Gradients are averaged, and so are those of micro-batches; ranks do not divide a sequence.
    "gradient_allreduce_op": KeyRule(checked.choice("mean"), lambda _: {}),
    "managed_gradient_accumulation": KeyRule(ValueRule("true", lambda on: on or REFUSED), lambda _: {}),
    "sequence_parallel_size": KeyRule(checked.integer(1, 1), lambda _: {}),
}

# --------------------------------------------------------------------------------------------- ignored

_STAGE_3 = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
    "max_reuse_distance module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential"
)
_NOT_READ = {
    "": "optimizer scheduler disable_allgather prescale_gradients gradient_predivide_factor aio "
    "zero_force_ds_cpu_optimizer checkpoint datastates_ckpt steps_per_print wall_clock_breakdown "
    "memory_breakdown dump_state log_level flops_profiler comms_logger timers tensorboard wandb csv_monitor "
    "comet monitor_config vocabulary_size autotuning seq_parallel_communication_data_type pipeline "
    "zero_allow_untested_optimizer disable_python_gc graph_harvesting",
    "zero_optimization.": "contiguous_gradients reduce_scatter reduce_bucket_size "
    "use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size overlap_comm "
    "round_robin_gradients parameter_alignment sub_group_size mics_hierarchical_params_gather "
    "memory_efficient_linear leaf_module override_module_apply legacy_stage1 ignore_unused_parameters "
    "compute_grad_norm log_trace_cache_warnings enable_sanity_checks cpu_offload_use_pin_memory "
    "save_muon_momentum_buffer_in_memory load_from_fp32_weights elastic_checkpoint "
    "pipeline_loading_checkpoint stage3_gather_fp16_weights_on_model_save "
    f"stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save {_STAGE_3}",
    "zero_optimization.stage3_": _STAGE_3,
    "zero_optimization.offload_param.": "buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization.offload_optimizer.": "buffer_count pin_memory pipeline_read pipeline_write fast_init "
    "super_offload cpuadam_cores_perc",
    "bf16.": "immediate_grad_update check_overflow auto_cast consecutive_hysteresis "
    "loss_scale initial_scale_power loss_scale_window min_loss_scale hysteresis",  # nothing is scaled
    "fp16.": "auto_cast consecutive_hysteresis",
    "data_types.": "grad_accum_dtype keep_in_fp32_modules",
    "activation_checkpointing.": "synchronize_checkpoint_boundary profile",
    "compile.": "backend kwargs free_activation free_activation_threshold autoep_non_moe",
    "tensor_parallel.": "tp_overlap_comm tp dtype preset_model vocab_parallel_lm_head "
    "vocab_parallel_ce_backend",
}
IGNORED = frozenset(section + name for section, names in _NOT_READ.items() for name in names.split())

# --------------------------------------------------------------------------------------- no equivalent

_NEAREST = {
    "use bf16.enabled or fp16.enabled": "amp torch_autocast",
    "write offload_optimizer: {device: cpu}": "zero_optimization.cpu_offload",
    "write offload_param: {device: cpu}": "zero_optimization.cpu_offload_param",
    "cast the model's buffers before initialize": "data_types.buffer_dtype",
    "gradients are dense: build embeddings with sparse=False": "sparse_gradients",
    "set loader.drop_last in the Config": "dataloader_drop_last",
    "experts are sharded like any other parameters": "expert_parallel use_data_before_expert_parallelism",
    "give tp_plan= to initialize": "tensor_parallel.partition_config",
    "engine.generate keeps parameters gathered": "hybrid_engine",
    "choose samples in your Dataset or DataLoader": "data_efficiency curriculum_learning",
    "start torchrun with other ranks and keep the global batch yourself": "elasticity",
    "main parameters are float32, or bfloat16": "fp16.fp16_master_weights_and_grads",
    "checkpoints go to a directory": "nebula",
    "use activation_checkpointing.cpu_checkpointing": "compile.offload_activation",
    "zeroshard trains the model as it is": "sparse_attention progressive_layer_drop weight_quantization "
    "compression_training quantize_training eigenvalue",
    "nothing is quantized on the wire; communication_data_type narrows gradients": "zero_optimization."
    "zero_quantized_weights zero_optimization.zero_quantized_nontrainable_weights "
    "zero_optimization.zero_quantized_gradients zero_optimization.zeropp_loco_param",
    "use offload_optimizer, with ratio for a part that stays on the device": "zero_optimization.zenflow",
}
NO_EQUIVALENT = {key: nearest for nearest, keys in _NEAREST.items() for key in keys.split()}
"""What to use instead. Empty and disabled values ask for nothing."""

# ------------------------------------------------------------------------------------------- all of them

KNOWN = frozenset(MAPPED) | IGNORED | frozenset(NO_EQUIVALENT)

SECTIONS = frozenset(key.rpartition(".")[0] for key in KNOWN) - {""}

_OLD_NAMES = {"bfloat16": "bf16"}
SWITCHED = frozenset({"bf16", "fp16"})
"""Sections that have no effect unless `enabled` is true."""

_Config = TypeVar("_Config", bound=Config)


def translate(kind: type[_Config], config: Mapping[str, Any] | str | os.PathLike[str]) -> _Config:
    """Return the Config for `Config.from_deepspeed`, and warn of keys and sections that it does not hold.

    Args:
        kind: the class to build.
        config: a mapping of DeepSpeed's keys and sections, or the path of such a file.

    Raises:
        ValueError: listing all keys that are unknown, wrong, "auto", or have no equivalent.
    """
    if isinstance(config, str | os.PathLike):
        return read_file(config, lambda content: translate(kind, content))
    if not isinstance(config, Mapping):
        raise ValueError(f"expected a mapping of DeepSpeed config keys, got {with_type(config)}")
    leaves = dict(_leaves({_OLD_NAMES.get(name, name): value for name, value in config.items()}))
    problems = [problem for key, value in leaves.items() if (problem := _problem(key, value))]
    accepted = {key: MAPPED[key].rule.accept(value) for key, value in leaves.items() if key in MAPPED}
    options, conflicts = _options({key: value for key, value in accepted.items() if value is not REFUSED})
    batch_problem, notes = _resolve_batch(options, os.environ.get("WORLD_SIZE"))
    problems += [*conflicts, *batch_problem]
    if problems:
        raise ValueError("\n- ".join(["DeepSpeed config:", *problems]))
    notes += [] if config.get("gradient_clipping") is not None else [_UNCLIPPED]
    if ignored := ", ".join(key for key in leaves if key in IGNORED):
        notes.append(f"not read: {ignored} ({_ELSEWHERE})")
    if notes:
        warn_first("\n- ".join(["DeepSpeed config:", *notes]))
    return kind.from_dict(_nested(options))


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the given values by dotted key; sections that are switched off and null give none."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if key in SECTIONS and isinstance(value, Mapping):
            if key not in SWITCHED or value.get("enabled"):
                yield from _leaves(value, key + ".")
        elif value is not None:
            yield key, value


def _problem(key: str, value: Any) -> str | None:
    """Return the problem of one key, if it has one."""
    if key in MAPPED and value == "auto":
        return f"'{key}': 'auto' is filled in by the Trainer of transformers, from its TrainingArguments"
    if key in MAPPED:
        rule = MAPPED[key].rule
        is_wrong = rule.accept(value) is REFUSED
        return f"'{key}': expected {rule.expected}, got {with_type(value)}" if is_wrong else None
    if key in NO_EQUIVALENT:
        is_disabled = not value or (isinstance(value, Mapping) and value.get("enabled") is False)
        return None if is_disabled else f"'{key}' has no equivalent: {NO_EQUIVALENT[key]}"
    if key in SECTIONS:
        return f"'{key}': expected a section, got {with_type(value)}"
    return None if key in KNOWN else _unknown(key)


def _unknown(key: str) -> str:
    leaf = key.rpartition(".")[2]
    # The same name in another section is meant rather than a similar one: 'stage'.
    in_order = sorted(KNOWN, key=lambda known: (known in IGNORED, known))
    close = [known for known in in_order if known.rpartition(".")[2] == leaf]
    close += difflib.get_close_matches(key.lower(), sorted(KNOWN | SECTIONS), n=1)
    return f"unknown key '{key}'" + (f"; did you mean '{close[0]}'?" if close else "")


def _options(leaves: Mapping[str, Any]) -> tuple[Options, list[str]]:
    """Return the options that mapped keys ask for, and the contradictions between them."""
    options: Options = {"stage": 0}  # no zero_optimization: nothing is sharded
    by: dict[str, str] = {}
    conflicts = []
    for key, value in leaves.items():
        for option, asked in MAPPED[key].options(value).items():
            if by.setdefault(option, key) == key:
                options[option] = asked
            elif options[option] != asked:
                both = f"{option}={show(options[option])}, '{key}' for {show(asked)}"
                conflicts.append(f"'{by[option]}' asks for {both}")
    if options.get("precision.param_dtype") is torch.float16:
        options.setdefault("precision.loss_scale", "dynamic")
    elif options.get("precision.param_dtype") is torch.bfloat16:
        options.setdefault("nonfinite", "skip")  # the default of DeepSpeed 0.19.6
    _tell_dynamic(options)
    return options, conflicts


def _tell_dynamic(options: Options) -> None:
    """Join the options of a dynamic loss scale into one; they have no effect with a fixed scale."""
    asked = {key.removeprefix(_DYNAMIC): options.pop(key) for key in [*options] if key.startswith(_DYNAMIC)}
    if asked and options.get("precision.loss_scale") == "dynamic":
        options["precision.loss_scale"] = asked


def _resolve_batch(options: Options, world_size: str | None) -> tuple[list[str], list[str]]:
    """Divide train_batch_size by the given factors; return the problems and the notes of that."""
    batch = options.pop("train_batch_size", None)
    if batch is None:
        return [], []
    size, steps = options.get("micro_batch_size"), options.get("gradient_accumulation_steps")
    data_ranks = max(1, int(world_size or 1) // options.get("mesh.tp", 1))
    per_rank = (size or 1) * (steps or 1)
    is_given = size is not None and steps is not None
    # Without WORLD_SIZE, a batch with both factors given determines the number of ranks.
    rest, remainder = divmod(batch, per_rank if is_given and not world_size else per_rank * data_ranks)
    if remainder or not rest or (is_given and world_size and rest != 1):
        parts = f"micro-batch {size or 'not given'}, accumulation steps {steps or 'not given'}"
        return [f"'train_batch_size': {batch} does not go into {parts}, data-parallel ranks {data_ranks}"], []
    if is_given:
        return [], []
    options["gradient_accumulation_steps" if size else "micro_batch_size"] = rest
    note = f"train_batch_size={batch} was taken for one rank: WORLD_SIZE, which torchrun sets, is not set"
    return [], [] if world_size else [note]


_ELSEWHERE = "initialize takes objects of torch; docs/migrating.md has what does the work of the others"
_UNCLIPPED = (
    "gradient_clipping is not given, so gradients are not clipped; recent DeepSpeed (0.19.8) clips at 1.0"
)


def _nested(options: Options) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in options.items():
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    return nested
