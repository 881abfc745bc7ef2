"""Wrappers of torch that distribute a module: refused around one that is sharded already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

_APIS = frozenset(("fully_shard", "replicate", "replicate_with_fsdp"))
"""Composable functions of torch.distributed that take over the parameters of a module."""

_IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""Names that DistributedDataParallel leaves alone: it reads them before it looks at any parameter."""


def refuse_wrappers(modules: Iterable[nn.Module], give: Callable[[nn.Module, str, Any], None]) -> None:
    """Have DistributedDataParallel and fully_shard raise an error before they change one of these modules.

    Args:
        give: sets an attribute of a module.
    """
    from torch.distributed._composable.contract import STATE_KEY  # torch imports it with fully_shard

    for module in modules:
        give(module, _IGNORED_BY_DDP, _NoNames())
        give(module, STATE_KEY, _NoState(vars(module).get(STATE_KEY, {})))


class _NoNames:
    def __iter__(self) -> Iterator[str]:
        raise _refusal("DistributedDataParallel")


class _NoState(dict[Any, Any]):
    """The states of the composable functions that were applied to a module."""

    def __contains__(self, api: object) -> bool:
        if (name := getattr(api, "__name__", "")) in _APIS:
            raise _refusal(name)
        return super().__contains__(api)


def _refusal(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} of a model that zeroshard has sharded: leave {name} out; the engine, or the model after "
        "zeroshard.shard, reduces gradients over all ranks itself"
    )
