"""Under which names a parameter is written."""

from __future__ import annotations

import pytest

from zeroshard.checkpoint.manifest import saved_names

TIED = {"tied": {"head": "embed", "decoder": "embed"}}


@pytest.mark.parametrize(
    ("model", "names", "expected"),
    [
        (TIED, ["norm"], ["norm"]),
        (TIED, ["embed", "decoder", "head"], ["embed"]),
        (TIED, ["decoder", "embed", "head"], ["embed"]),  # transformers ties to this one
        (TIED, ["decoder", "head"], ["decoder"]),
        ({"tied": {}}, ["embed", "head"], ["embed", "head"]),  # the user tied them: transformers will not
        ({}, ["embed", "head"], ["embed"]),  # not of transformers
        (TIED | {"not_saved": ["positions"]}, ["positions"], []),
    ],
)
def test_a_parameter_is_written_under_the_names_that_are_not_tied_again(model, names, expected):
    assert saved_names(model, names) == expected
