"""The moving average of an engine's parameters, as users have it."""

from __future__ import annotations

from zeroshard.agreement import require_equal
from zeroshard.averages import Averages
from zeroshard.comm.collectives import on_all
from zeroshard.engine import Engine
from zeroshard.parameters.state import Moment


class EMA(Averages):
    """The exponential moving average (EMA) of the trained parameters of an engine; made on all ranks alike.

    It belongs to the engine from then on. Each step that the engine counts updates it, whoever takes the
    step; a step that is left out (float16, `nonfinite="skip"`) does not. Checkpoints of the engine hold it.
    Averages are as in torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(decay): the first
    update copies the parameters, each later one is `average.lerp_(parameter, 1 - decay)`, in float32 or
    wider. Frozen parameters are not averaged, and buffers are copied.

    Args:
        engine: the engine; make the average before `load_checkpoint`, which loads it.
        decay: 0 to 1, the share of the average that an update keeps.
        name: the name in checkpoints, for several averages of one engine.

    Raises:
        ValueError: an argument is not as expected, or differs between ranks; or the engine has an average
            of this name.
        RuntimeError: the call is in a forward or backward, or in `unsharded()` or `applied()`; or there is no
            such memory, or space on disks.
    """

    def __init__(self, engine: Engine, decay: float, *, name: str = "ema") -> None:
        if not isinstance(engine, Engine):
            raise ValueError(f"EMA: expected the engine of zeroshard.initialize, got {type(engine).__name__}")
        runtime, kept = engine._runtime, engine._parts.averages

        def make() -> tuple[str, float]:
            if not str(name).isidentifier():
                raise ValueError(f"EMA: expected a name like 'ema' or 'ema_2', got {name!r}")
            if name in kept:
                raise ValueError(
                    f"EMA: the engine has an average '{name}' already: give this one another name"
                )
            runtime.wait("EMA()", Moment.SHOWN, Moment.AVERAGED)
            Averages.__init__(self, runtime, decay)
            return name, self.decay

        everyone = on_all(runtime.context.axes.world, "agreement on an EMA", make)
        versions = [f"name {own!r} and decay {share}" for own, share in everyone]
        require_equal(versions, lambda found: ValueError(f"EMA: expected the same on every rank; {found}"))
        kept[name] = self
