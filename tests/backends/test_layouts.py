"""Every layout of a model resumes every other: weights and moments are bit-equal, the next samples
are the same, and the next ten losses are those of the uninterrupted run.
"""

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
