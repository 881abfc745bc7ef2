"""The reader of DeepSpeed configs: it stands above this package and is imported when a user asks for it.

`Config.from_deepspeed` is a method of the Config, but `import zeroshard` should not load the keys of another
engine. So this function has the one import upward.
"""

from types import ModuleType


def deepspeed_reader() -> ModuleType:
    """Import `zeroshard.deepspeed.translate`."""
    from zeroshard.deepspeed import translate

    return translate
