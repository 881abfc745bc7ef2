"""The settings of an engine: frozen dataclasses.

The annotation of a field holds a rule, which knows the expected values and the stored one:

    stage: Annotated[int, checked.integer(0, 3)] = 3
                          '----------------- accepts, normalizes, and names what it expects

A type that includes None accepts None too; bool fields and nested sections need no rule.
`Checked` applies the rules, then the requirements between fields. A wrong value raises a `ValueError` with
the dotted key, the expected value and the given one.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self

from zeroshard.config import checked
from zeroshard.config.checked import Checked, Condition, Requirement, read_file
from zeroshard.config.dtypes import dtype_of
from zeroshard.config.pipeline import KEPT_WEIGHTS, MOVED_WEIGHTS, NEWEST_WEIGHTS, Pipeline

if TYPE_CHECKING:
    from torch import dtype as Dtype
    from torch.nn import Module
else:
    Dtype = Module = object  # torch takes seconds to import, and the rules need no types


@dataclass(frozen=True, kw_only=True)
class DynamicLossScale(Checked):
    """The adaptation of the float16 loss scale to overflows; torch.amp.GradScaler has these defaults."""

    _prefix = "precision.loss_scale."
    start: Annotated[float, checked.POSITIVE] = 65536.0
    """The scale of the first step."""
    window: Annotated[int, checked.integer(1)] = 2000
    """Steps without overflow after which the scale is doubled."""
    minimum: Annotated[float, checked.POSITIVE] = 1.0
    """An overflow halves the scale, but not below this."""
    hysteresis: Annotated[int, checked.integer(1)] = 1
    """Overflows since the scale was last doubled, from which number on each one halves the scale."""

    def _requirements(self) -> list[Requirement]:
        needed = f">= minimum={self.minimum:g}"
        return [(True, "start", (self.start >= self.minimum, "start", needed))]


def _dynamic_loss_scale(value: Any) -> Any:
    if isinstance(value, Mapping):
        return DynamicLossScale.from_dict(value)
    return value if isinstance(value, DynamicLossScale) else checked.REFUSED


_LOSS_SCALE = checked.either(
    checked.choice("dynamic"),
    checked.POSITIVE,
    checked.ValueRule("a dict of start, window, minimum, hysteresis", _dynamic_loss_scale),
)


@dataclass(frozen=True, kw_only=True)
class Precision(Checked):
    """Dtypes of computation, exchanges and main parameters: torch dtypes, or names such as "bf16".

    A dtype alone, `precision="bf16"`, stands for `Precision(param_dtype="bf16")`.
    """

    _prefix = "precision."
    _short = ", or a dtype such as 'bf16', which stands for param_dtype"
    param_dtype: Annotated[Dtype | None, checked.DTYPE] = None
    """Dtype of parameters and float inputs in forward and backward. None: as the model has them."""
    overrides: Annotated[
        Mapping[str, Dtype] | tuple[tuple[str, Dtype], ...] | None, checked.DTYPES_BY_NAME
    ] = None
    """Other dtypes in forward and backward, by names of parameters or modules; the first that fits holds.

    A module all of whose parameters have one gets its float inputs in it. None: param_dtype for all.
    """
    reduce_dtype: Annotated[Dtype | None, checked.DTYPE] = None
    """Dtype in which gradients are summed over ranks. None: the compute dtype, but at least float32."""
    main_dtype: Annotated[Dtype | None, checked.MAIN_DTYPE] = None
    """Dtype of main parameters and their gradients.

    None: the model's, but at least float32. Optimizer states and updates have at least float32; updates of
    bfloat16 parameters are rounded stochastically.
    """
    output_dtype: Annotated[Dtype | None, checked.DTYPE] = None
    """Dtype to which the model's float outputs are cast. None: they stay as they are."""
    loss_scale: Annotated[float | str | DynamicLossScale | None, _LOSS_SCALE] = None
    """Factor on the loss against underflow of float16 gradients.

    None: "dynamic", which adapts it. A dict of start, window, minimum and hysteresis is a dynamic scale too.
    """

    @classmethod
    def _from_short(cls, value: Any) -> Any:
        dtype = checked.DTYPE.accept(value)
        return checked.REFUSED if dtype is checked.REFUSED else cls(param_dtype=dtype)

    def _requirements(self) -> list[Requirement]:
        half = self.param_dtype == dtype_of("float16"), "param_dtype", "float16"
        has_halves = dtype_of("float16") in dict(self.overrides or ()).values()
        return [
            (self.loss_scale is not None, "loss_scale", half),
            (has_halves, "overrides", half),  # else there would be no loss scale
        ]


@dataclass(frozen=True, kw_only=True)
class Offload(Checked):
    """Values outside of the device: "none" (they stay on it), "cpu" (host memory) or "nvme" (files)."""

    _prefix = "offload."
    optimizer: Annotated[str, checked.TIER] = "none"
    """Tier of optimizer states, and of main parameters with which the device does not compute."""
    parameters: Annotated[str, checked.TIER] = "none"
    """Tier of the sharded parameters between uses."""
    step_in_backward: Annotated[bool | None, checked.BOOLEAN] = None
    """True steps each unit in the backward, as soon as its gradient is there; False in none.

    This means one backward for each micro-batch, and no gradients afterwards. None: only in `train_batch`,
    where nothing asks for gradients.
    """
    activations: Annotated[str, checked.choice("none", "cpu")] = "none"
    """Tier of the tensors that backward needs, between forward and backward of their unit.

    With recompute="unit" these are the inputs of the unit.
    """
    device_fraction: Annotated[float, checked.FRACTION] = 0.0
    """Part of what is offloaded that stays on the device, 0 to 1: parameters first, then optimizer states."""
    nvme_path: Annotated[str | None, checked.PATH] = None
    """Directory for the files of the nvme tier."""

    def _requirements(self) -> list[Requirement]:
        has_path = self.nvme_path is not None, "nvme_path", "a path"
        return [(getattr(self, tier) == "nvme", tier, has_path) for tier in ("optimizer", "parameters")]


TILE_BYTES = 256 * 10**6
"""The most bytes of the logits of a tile, with what is computed of them, for tiles="auto"."""
ROW_BYTES = 8
"""Bytes of a logit in a tile: in float32, and once more as its exponential or as its gradient."""


@dataclass(frozen=True, kw_only=True)
class Loss(Checked):
    """The loss of a causal language model of transformers that trains with labels."""

    _prefix = "loss."
    tiles: Annotated[str | int, checked.either(checked.choice("none", "auto"), checked.integer(1))] = "none"
    """Tiles of tokens in which logits and loss are computed, so that the logits are never all there.

    "auto": as few as keep the logits of one within 256 MB. For other models see `tiled_cross_entropy`.
    """


@dataclass(frozen=True, kw_only=True)
class Mlp(Checked):
    """The gated MLPs of a model of transformers."""

    _prefix = "mlp."
    tiles: Annotated[str | int, checked.either(checked.choice("none", "auto"), checked.integer(1))] = "none"
    """Tiles of tokens in which each MLP computes, so that its wide tensors are never all there.

    The backward computes each tile again. "auto": as few as keep one within 256 MB.
    """


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Checked):
    """The checkpoints of an engine."""

    _prefix = "checkpoint."
    keep_last: Annotated[int | None, checked.integer(1)] = None
    """Number of checkpoints that are kept, the newest ones. None: all."""
    verify: bool = True
    """True compares checksums on load."""
    frozen: bool = True
    """False leaves out frozen parameters: such a checkpoint loads over the same frozen parameters."""


@dataclass(frozen=True, kw_only=True)
class Loader(Checked):
    """The DataLoader that `initialize` builds from `training_data`."""

    _prefix = "loader."
    num_workers: Annotated[int, checked.integer(0)] = 0
    """Processes that load samples; 0: this process loads."""
    pin_memory: Annotated[bool | None, checked.BOOLEAN] = None
    """True collates batches in pinned memory. None: True for an accelerator."""
    drop_last: bool = False
    """True leaves out the last batch of an epoch if it is smaller."""


@dataclass(frozen=True, kw_only=True)
class Mesh(Checked):
    """Ranks along the model-parallel axes; the data-parallel axes get the remaining factor."""

    _prefix = "mesh."
    pp: Annotated[int, checked.integer(1)] = 1
    """Ranks along the pipeline-parallel axis."""
    tp: Annotated[int, checked.integer(1)] = 1
    """Ranks along the tensor-parallel axis."""
    sequence: bool = False
    """True divides norms and dropout of a model of transformers along the sequence, over the tensor ranks."""


_OF_PIPELINES = ("schedule", "num_microbatches", "num_chunks", "split", "balance", "trace")
_EARLY = "offload.step_in_backward"
_WIDE, _NOT_HALF = "another dtype than bfloat16", "another dtype than float16"


@dataclass(frozen=True, kw_only=True)
class Config(Checked):
    """All settings of `zeroshard.initialize`. Raises ValueError for an impossible value or combination."""

    stage: Annotated[int, checked.integer(0, 3)] = 3
    """0: nothing is sharded; 1: optimizer states are; 2: gradients too; 3: parameters too."""
    precision: Precision = Precision()
    """Dtypes of computation, exchanges and main parameters."""
    device: Annotated[str | None, checked.DEVICE] = None
    """Device of this rank; of the same type on all ranks.

    None: the accelerator of its local rank, if there is one and the open process group serves it, else the
    CPU.
    """
    gradient_accumulation_steps: Annotated[int, checked.integer(1)] = 1
    """Micro-batches whose gradients are added up before an optimizer step."""
    clip_grad_norm: Annotated[float | None, checked.POSITIVE] = None
    """Largest global L2 norm of the gradients, beyond which they are scaled down. None: no clipping."""
    nonfinite: Annotated[str, checked.choice("report", "skip", "error")] = "report"
    """A step whose gradient norm is inf or nan is taken ("report"), left out ("skip") or an error ("error").

    "report" warns once if the host sees such a norm (with clipping) or loss (of engine.backward): on CPU
    ranks, or where a StepLog reads them. For float16, it leaves the step out as well, and "error" waits until
    the loss scale can't be lowered.
    """
    micro_batch_size: Annotated[int, checked.integer(1)] = 1
    """Samples in a rank's micro-batch, for the DataLoader that `initialize` builds."""
    units: Annotated[Sequence[str] | Callable[[Module], bool] | None, checked.UNITS] = None
    """Modules that are gathered as one unit: class names, names of modules or patterns, or a predicate.

    None: repeated blocks are found.
    """
    ignored: Annotated[Sequence[str] | None, checked.PATTERNS] = None
    """Names of parameters, * for any letters, that each rank keeps whole and steps by itself. None: none."""
    frozen: Annotated[str | Sequence[str], checked.FROZEN] = "shard"
    """Frozen parameters at stage 3: "shard", or "replicate", whole on each rank and never gathered.

    Names of parameters or modules, and patterns, make those alone whole.
    """
    shard_group_size: Annotated[int | None, checked.integer(1)] = None
    """Ranks in a shard group, for hybrid sharding. None: all ranks are one group."""
    reshard_after_forward: Annotated[bool | int, checked.either(checked.BOOLEAN, checked.integer(2))] = True
    """True frees parameters between forward and backward. An integer: kept, sharded over that many ranks."""
    num_prefetch: Annotated[int | None, checked.integer(0)] = None
    """Units gathered ahead of the unit that computes; as many reductions may be under way.

    None: 1, or up to 8 small units that have 262,144 elements together.
    """
    recompute: Annotated[str, checked.choice("none", "lean", "unit", "auto")] = "none"
    """With "unit" backward recomputes the activations inside each unit; with "none" all are kept.

    With "lean" it recomputes element-wise functions inside MLPs of transformers alone. With "auto" it
    recomputes some units, so that a step stays within `memory_budget`.
    """
    memory_budget: Annotated[int | float | None, checked.MEMORY] = None
    """Bytes of the device that a rank may use, or a share of it, for recompute="auto". None: 0.9."""
    compile: bool = False
    """True compiles each unit with torch.compile."""
    offload: Offload = Offload()
    """Values in host memory or in files."""
    loss: Loss = Loss()
    """Tiles of the loss."""
    mlp: Mlp = Mlp()
    """Tiles of MLPs."""
    checkpoint: Checkpoint = Checkpoint()
    """Number and content of checkpoints."""
    loader: Loader = Loader()
    """The DataLoader that `initialize` builds."""
    mesh: Mesh = Mesh()
    """Ranks along the model-parallel axes."""
    pipeline: Pipeline = Pipeline()  # noqa: RUF009 - it is frozen
    """Schedule of a batch over the pipeline-parallel ranks."""
    watchdog_s: Annotated[float, checked.SECONDS] = 600.0
    """Seconds that a rank may wait in a collective before the watchdog ends the run."""

    def _requirements(self) -> list[Requirement]:
        sharded = (self.stage >= 1, "stage", ">= 1")
        stage_3 = (self.stage == 3, "stage", "3")
        pipelined, whole = (self.mesh.pp > 1, "mesh.pp", ">= 2"), (self.mesh.pp == 1, "mesh.pp", "1")
        unparted = (not self.mesh.sequence, "mesh.sequence", "False")
        not_compiled, undivided = (not self.compile, "compile", "False"), (self.mesh.tp == 1, "mesh.tp", "1")
        not_overridden = (not self.precision.overrides, "precision.overrides", "None")
        is_auto = self.recompute == "auto", "recompute", "'auto'"
        not_auto = not is_auto[0], "recompute", "'none', 'lean' or 'unit'"
        regroups = not isinstance(self.reshard_after_forward, bool)
        not_half, unclipped, unjudged = unread = self._no_judgement()
        not_narrow = (self.precision.main_dtype != dtype_of("bfloat16"), "precision.main_dtype", _WIDE)
        of_pipelines = [n for n in _OF_PIPELINES if getattr(self.pipeline, n) != getattr(Pipeline, n)]
        offload, untraced = self.offload, (not self.pipeline.trace, "pipeline.trace", "False")
        return [
            (self.loss.tiles != "none", "loss.tiles", untraced),
            # Of each tile a rank would have a part of the sequence.
            (self.mlp.tiles != "none", "mlp.tiles", untraced, not_compiled, unparted),
            (self.shard_group_size is not None, "shard_group_size", sharded),
            (regroups, "reshard_after_forward", stage_3),
            (offload.parameters != "none", "offload.parameters", stage_3),
            (bool(offload.step_in_backward), _EARLY, stage_3, whole, *unread),
            (is_auto[0], "recompute", untraced),
            (self.memory_budget is not None, "memory_budget", is_auto),
            # The backward of compiled code may write to the memory of saved tensors.
            (offload.activations != "none", "offload.activations", not_auto, not_compiled),
            # A batch of a pipeline is cut into pipeline.num_microbatches instead.
            (self.gradient_accumulation_steps > 1, "gradient_accumulation_steps", whole),
            # Between chunks each tensor rank would have a part of the sequence, and number it from 0.
            (self.mesh.sequence, "mesh.sequence", whole),
            *((True, f"pipeline.{name}", pipelined) for name in of_pipelines),
            # A trace has the operations of whole layers of modules, not the calls of modules, at which
            # values are cast.
            (self.pipeline.trace, "pipeline.trace", undivided, not_compiled, not_overridden),
            *self._asynchronous_requirements(unclipped, unjudged, not_half, not_narrow, not_compiled),
            # Gradients of ignored parameters are neither unscaled nor widened.
            (bool(self.ignored), "ignored", not_half, not_narrow),
        ]

    def _no_judgement(self) -> tuple[Condition, Condition, Condition]:
        """The settings with which a step reads no gradient before it begins."""
        return (
            (self.precision.param_dtype != dtype_of("float16"), "precision.param_dtype", _NOT_HALF),
            (self.clip_grad_norm is None, "clip_grad_norm", "None"),
            (self.nonfinite == "report", "nonfinite", "'report'"),
        )

    @property
    def steps_in_backward(self) -> bool | None:
        """As `offload.step_in_backward`, but False if units can be stepped after a backward only."""
        is_alone = self.mesh.pp == self.mesh.tp == 1  # tensor ranks compare gradients in `step()`
        unread = all(is_met for is_met, *_ in self._no_judgement())
        can = self.stage == 3 and is_alone and unread
        return self.offload.step_in_backward if can or self.offload.step_in_backward else False

    def _asynchronous_requirements(
        self,
        unclipped: Condition,
        unjudged: Condition,
        not_half: Condition,
        not_narrow: Condition,
        not_compiled: Condition,
    ) -> list[Requirement]:
        """The settings that do not go together with the steps of an asynchronous pipeline."""
        pipeline, pp = self.pipeline, self.mesh.pp
        if not pipeline.is_asynchronous:
            return []
        method, correction = pipeline.chosen_weights, pipeline.chosen_correction
        key = "pipeline.schedule" if pipeline.weights is None else "pipeline.weights"
        tiers = ("offload.optimizer", self.offload.optimizer), ("offload.parameters", self.offload.parameters)
        near = [(tier == "none", name, "'none'") for name, tier in tiers]
        not_ignored = (not self.ignored, "ignored", "None")
        not_recomputed = (self.recompute in ("none", "lean"), "recompute", "'none' or 'lean'")
        held = (self.offload.activations == "none", "offload.activations", "'none'")
        resharded = (self.reshard_after_forward is True, "reshard_after_forward", "True")
        per_step = pipeline.microbatches_per_step
        enough = f">= mesh.pp={pp}, so that two versions are enough"
        has_enough = (per_step is None or per_step >= pp, "pipeline.microbatches_per_step", enough)
        spikes = correction == "spike"
        return [
            # Each pipeline rank steps by itself: nobody has the gradients of the whole model at a time.
            # Gradients of ignored parameters are not averaged over the micro-batches of a step.
            (True, key, unclipped, unjudged, not_half, not_ignored),
            # A second forward inside a backward would have the weights of the backward. Compiled code, and
            # hooks of saved tensors, keep what they make of the weights of the forward.
            (method not in KEPT_WEIGHTS, key, not_recomputed, held, not_compiled),
            (True, key, (self.recompute != "auto", "recompute", "'none', 'lean' or 'unit'")),
            (method not in NEWEST_WEIGHTS, key, resharded),
            (method not in NEWEST_WEIGHTS or spikes, key, *near),
            (method in MOVED_WEIGHTS or spikes, key, not_narrow),
            (method == "double", key, has_enough),
        ]

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read a .json or .toml file. Raises ValueError naming the file, and the line of a syntax error."""
        return read_file(path, cls.from_dict)

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, Any] | str | os.PathLike[str]) -> Self:
        """Read a DeepSpeed config: a dict, or the path of a file; see docs/migrating.md.

        One warning lists the keys that are not read: the optimizer and scheduler, which `initialize` takes as
        objects, and keys without effect.
        `train_batch_size` is divided over WORLD_SIZE, which torchrun sets; without it, over one rank.

        Raises:
            ValueError: listing all keys that are unknown, wrong, "auto", or have no equivalent.
        """
        from zeroshard.deepspeed.translate import translate  # the one import upward, for those who ask for it

        return translate(cls, config)

    @classmethod
    def parse(cls, config: "Config | Mapping[str, Any] | str | os.PathLike[str] | None") -> "Config":
        """Return the Config for a Config, a mapping, a path, or None, which means the defaults.

        Raises:
            ValueError: another type; a file that cannot be parsed; an unknown key or a bad value, by its key.
            OSError: a file that cannot be read.
        """
        if isinstance(config, Config):
            return config
        if isinstance(config, str | os.PathLike):
            return cls.from_file(config)
        return cls.from_dict({} if config is None else config)


Checked._whole = Config

GivenConfig = Config | Mapping[str, Any] | str | os.PathLike[str] | None
"""A Config, a dict, or the path of a .json or .toml file; None for the defaults."""


def refuse_pipeline(config: Config, call: str) -> None:
    """Raise ValueError if `config` asks for pipeline ranks, which `call` does not know."""
    if config.mesh.pp > 1:
        raise ValueError(
            f"{call}: expected mesh.pp=1, got {config.mesh.pp}; a pipeline needs zeroshard.initialize and "
            "engine.train_batch"
        )
