"""Each layout of a model resumes each other: weights and moments bit-equal, the same samples next,
and the next ten losses those of the run that was not interrupted."""

from __future__ import annotations

import functools
import tempfile

import pytest
from layouts import LAYOUTS, MIXTURE, of_layout

from drivetrain.conformance.crossing import Saved, crossing, save

# the first test of a run waits until all have saved
pytestmark = [pytest.mark.slow, pytest.mark.timeout(840)]


@functools.cache
def saved(layout: str) -> Saved:
    return save(of_layout(layout), tempfile.mkdtemp(prefix="drivetrain-layout-"), MIXTURE)


@pytest.mark.parametrize("reader", LAYOUTS)
def test_each_layout_resumes_each(reader: str) -> None:
    for writer in LAYOUTS:
        crossing(saved(writer), of_layout(reader))
