"""The most bytes that are alive at a time."""

from zeroshard.forwards.dryrun import LiveBytes


class Peak(LiveBytes):
    """Counts after each operation."""

    peak = 0

    def __torch_dispatch__(self, *call):
        result = super().__torch_dispatch__(*call)
        self.peak = max(self.peak, self.now)
        return result
