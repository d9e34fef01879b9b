"""Mistakes that were made with meshes: each is planted, and caught by the law that is meant for it.

The driver's own comparisons before the first update are off, since they would refuse some of the
faults earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from faults import NORM, SGD
from few_cases import only_quick
from planted_drivers import broken

from drivetrain.conformance import Case, cases

EXPERTS = "1_gradient-experts_equal_one_process"
WHOLE = "6_resume-whole_weights"


@dataclass(frozen=True)
class Planted:
    """A fault, the mesh that shows it, and the check that must see it."""

    fault: str
    dimensions: dict[str, int]
    caught_by: str
    size: int = 2

    def __str__(self) -> str:
        return f"{self.fault} {self.dimensions}"

    def cases(self, fault: str) -> list[Case]:
        options: dict[str, Any] = {**self.dimensions, "check": False, "fault": fault}
        found = cases("faulty-mesh", num_processes=self.size, options=options)
        return [case for case in found if str(case).startswith(self.caught_by)]


TENSOR, CONTEXT, EXPERT, PIPELINE = (
    {name: 2} for name in ("tensor", "context", "expert", "pipeline")
)
REPORTED = {
    "torchtitan#2972": Planted("not divided by items", PIPELINE, SGD + "-language"),
    "torchtitan#1733": Planted("divided by microbatches", PIPELINE, SGD + "-language"),
    "torchtitan#1750": Planted("a bias of each rank", TENSOR, SGD + "-language"),
    "transformers#46775": Planted("items divided by parts", CONTEXT, SGD + "-language"),
    "transformers#48205": Planted("no way back", EXPERT, EXPERTS),
    "pytorch#160285": Planted("averaged as others", EXPERT, EXPERTS),
    "Megatron-LM#5916": Planted("counted as others", EXPERT, NORM + "-language"),
    "Automodel#2995": Planted("router detached", EXPERT, EXPERTS),
    "miles_diffusion#35": Planted("norm of a part", TENSOR, NORM + "-language"),
}
"""Faults that were reported for other libraries: the number of ranks or microbatches scales a loss,
a gradient or a norm, or a gradient is lost between ranks.
"""
OTHERS = (
    Planted("weights untied", TENSOR, SGD + "-language"),
    Planted("fused layers partitioned as one", TENSOR, WHOLE),
    Planted("several in one taken for one", TENSOR, SGD + "-language"),
    Planted("one divisor for all norms", TENSOR, NORM + "-language"),
    Planted("items counted by each rank", TENSOR, SGD + "-language"),
    Planted("items counted by each rank", CONTEXT, SGD + "-language"),
    Planted("sharded in another order", TENSOR, WHOLE, size=4),
    Planted("exchanged twice", CONTEXT, SGD + "-language"),
    Planted("positions from 0", CONTEXT, SGD + "-language"),
    Planted("tied weights apart", PIPELINE, SGD + "-language"),
    Planted("tied weights counted by each", PIPELINE, NORM + "-language"),
    Planted("rows of another microbatch", PIPELINE, SGD + "-language"),
    Planted("answers in another order", EXPERT, EXPERTS),
)
ALL = (*REPORTED.values(), *OTHERS)


QUICK = {planted.caught_by: planted for planted in reversed(ALL) if planted.size == 2}
"""The first fault that each check sees. Other faults are slow."""


@pytest.mark.parametrize("planted", only_quick(ALL, QUICK.values()), ids=str)
def test_fault_of_a_mesh_is_caught(planted: Planted) -> None:
    assert any(broken(case) for case in planted.cases(planted.fault))


@pytest.mark.slow  # the laws are those of the sound driver, which is proved without them
@pytest.mark.parametrize("planted", ALL, ids=str)
def test_without_a_fault_nothing_is_caught(planted: Planted) -> None:
    found = planted.cases("")
    assert found
    assert not any(broken(case) for case in found)
