"""Configs of DeepSpeed: their reader stands above this package, and is imported when one is asked for.

`Config.from_deepspeed` has to be a method of the Config, while the keys of another engine are nothing that
each `import zeroshard` should load. So this is the one place with an import upward, and it is a late one.
"""

from types import ModuleType


def deepspeed_reader() -> ModuleType:
    """Import `zeroshard.deepspeed.reader`."""
    from zeroshard.deepspeed import reader

    return reader
