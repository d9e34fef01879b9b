"""Meshes that are compared with one process, and the page of their deviations.

python tests/backends/meshes.py FILE
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mesh_decoder
import mesh_mixture
import torch
from mesh_decoder import assert_alike, mesh

from drivetrain.backends.mesh.shape import MeshOptions, Shape
from drivetrain.conformance.subject import Subject

JOBS = {"decoder": mesh_decoder.train, "mixture of experts": mesh_mixture.train}


@dataclass(frozen=True)
class Compared:
    """A mesh of `size` processes in these dimensions, and the training of a model on it."""

    size: int
    dimensions: Mapping[str, Any]
    model: str = "decoder"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the job; one process receives only those that concern the model."""
    always: bool = False
    """True if it runs without the slow tests, too."""

    def __str__(self) -> str:
        return f"{self.size} {self.in_words} {self.trained}"

    @property
    def in_words(self) -> str:
        shard = Shape.of(MeshOptions(**self.dimensions), self.size).shard
        named = {**self.dimensions, **({"shard": shard} if shard > 1 else {})}
        return " ".join(f"{name}={value}" for name, value in named.items()) or "one"

    @property
    def trained(self) -> str:
        words = {"layers": "{} blocks", "lossy": "loss {}", "routed": "without a loss of routers"}
        named = [words.get(k, "{}").format(value) for k, value in self.arguments.items()]
        return ", ".join([self.model, *named]).replace("_", " ")

    def compare(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the results of each rank, and those of one process. Raises AssertionError where
        they differ by more than is allowed.
        """
        seen = mesh(self.size, **self.dimensions).run(JOBS[self.model], **self.arguments)
        of_model = {k: v for k, v in self.arguments.items() if k in ("layers", "routed")}
        expected = alone(self.model, **of_model)
        for rank in seen:
            assert_alike(rank, expected)
        return seen, expected


@functools.cache
def alone(model: str, **arguments: Any) -> dict[str, Any]:
    return Subject("cpu").run(JOBS[model], **arguments)[0]


def dense(
    size: int,
    how: str | int,
    always: bool = False,
    layers: int | None = None,
    **dimensions: Any,
) -> Compared:
    """Return a mesh to compare. `how`: the name of a plan, or a number of blocks; `layers`: the
    number of blocks with a plan.
    """
    arguments: dict[str, Any] = {"layers": how} if isinstance(how, int) else {"plan": how}
    if layers is not None:
        arguments["layers"] = layers
    if how == "logits":
        arguments["lossy"] = "of_parts"
    return Compared(size, dimensions, arguments=arguments, always=always)


def mix(size: int, plan: str = "", layers: int = 2, **dimensions: Any) -> Compared:
    """Return a mesh to compare on a mixture of experts. The routers' term of the loss is left out
    where a rank has only a part of the model's layers, or, by the plan "in sequence", of the
    positions that layers receive.
    """
    arguments: dict[str, Any] = {"plan": plan} if plan else {}
    if layers != 2:
        arguments["layers"] = layers
    if plan == "in sequence" or "pipeline" in dimensions:
        arguments["routed"] = False
    return Compared(size, dimensions, "mixture of experts", arguments)


MESHES = (
    dense(2, "plain", always=True),
    dense(2, "plain", replicate=2),
    dense(2, "in sequence", tensor=2),
    dense(2, "logits", always=True, tensor=2),
    dense(2, "plain", context=2),
    dense(4, "in sequence", tensor=2, context=2),
    dense(4, "plain", tensor=2),
    dense(4, "plain", replicate=2, context=2),
    dense(2, 2, always=True, pipeline=2),
    dense(4, 2, pipeline=2),
    dense(4, "in sequence", pipeline=2, tensor=2),
    dense(4, "plain", pipeline=2, context=2),
    mix(2, expert=2),
    mix(2, "plain", tensor=2, expert=2),
    mix(4, pipeline=2, expert=2),
    mix(4, "in sequence", pipeline=2, tensor=2, expert=2),
    dense(1, "plain"),
    dense(3, "plain"),
    dense(3, "plain", replicate=3),
    dense(4, "plain"),
    dense(4, "plain", replicate=2),
    dense(4, "plain", replicate=4),
    dense(4, "in sequence", tensor=2),
    dense(4, "plain", tensor=4),
    dense(4, "in sequence", tensor=4),
    dense(4, "logits", tensor=4),
    dense(4, "logits", tensor=2),
    dense(4, "logits", tensor=2, context=2),
    dense(4, "plain", tensor=2, replicate=2),
    dense(4, "in sequence", tensor=2, replicate=2),
    dense(4, "plain", context=2),
    dense(4, "plain", context=4),
    dense(4, "plain", tensor=2, context=2),
    dense(6, "plain", tensor=2),
    dense(6, "plain", context=2, replicate=3),
    dense(8, "plain", tensor=2, context=2),
    dense(8, "in sequence", tensor=2, context=2),
    dense(8, "in sequence", tensor=2, context=2, replicate=2),
    dense(8, "plain", tensor=4, context=2),
    dense(8, "plain", tensor=2, context=4),
    dense(8, "in sequence", tensor=4),
    dense(8, "plain", context=8),
    dense(2, "plain", tensor=2),
    dense(5, "plain"),
    dense(6, "plain", replicate=2),
    dense(6, "plain", context=2),
    dense(6, "in sequence", tensor=2, replicate=3),
    dense(8, "plain"),
    dense(8, "plain", replicate=4),
    dense(8, "plain", context=2),
    dense(8, "plain", context=4, replicate=2),
    dense(8, "plain", tensor=2),
    dense(8, "plain", tensor=2, replicate=4),
    dense(8, "in sequence", tensor=4, replicate=2),
    dense(8, "in sequence", tensor=4, context=2),
    dense(2, 3, pipeline=2, schedule="gpipe"),
    dense(2, 4, pipeline=2, schedule="interleaved"),
    dense(2, 6, pipeline=2, schedule="interleaved", stages_per_rank=3),
    dense(3, 4, pipeline=3),
    dense(4, 5, pipeline=4),
    dense(4, 2, pipeline=2, replicate=2),
    dense(4, 4, pipeline=2, schedule="interleaved"),
    dense(4, 2, pipeline=2, reshard_after_forward=False),
    dense(6, 3, pipeline=3),
    dense(8, 4, pipeline=4, replicate=2),
    dense(8, 2, pipeline=2, replicate=2),
    dense(4, "plain", pipeline=2, tensor=2),
    dense(4, "logits", pipeline=2, tensor=2),
    dense(4, "plain", pipeline=2, tensor=2, schedule="gpipe"),
    dense(4, "in sequence", layers=4, pipeline=2, tensor=2, schedule="interleaved"),
    dense(4, "logits", layers=4, pipeline=2, tensor=2, schedule="interleaved"),
    dense(6, "in sequence", layers=3, pipeline=3, tensor=2),
    dense(8, "in sequence", pipeline=2, tensor=2),
    dense(8, "logits", pipeline=2, tensor=2, replicate=2),
    dense(8, "in sequence", pipeline=2, tensor=4),
    dense(8, "plain", layers=4, pipeline=4, tensor=2),
    dense(4, "plain", pipeline=2, context=2, schedule="gpipe"),
    dense(4, "plain", layers=4, pipeline=2, context=2, schedule="interleaved"),
    dense(8, "plain", pipeline=2, context=2),
    dense(8, "plain", pipeline=2, context=2, replicate=2),
    dense(8, "plain", pipeline=2, context=4),
    dense(8, "in sequence", pipeline=2, tensor=2, context=2),
    dense(8, "logits", layers=4, pipeline=2, tensor=2, context=2, schedule="interleaved"),
    mix(2),
    mix(2, expert=2, context=2),
    mix(3, expert=3),
    mix(4, expert=2, shard=4),
    mix(4, expert=2, replicate=2),
    mix(4, expert=2, context=2),
    mix(6, expert=6),
    mix(6, expert=2),
    mix(6, expert=3),
    mix(8, expert=2),
    mix(8, expert=2, context=2, replicate=2),
    mix(2, "plain", tensor=2),
    mix(2, "in sequence", tensor=2),
    mix(2, "in sequence", tensor=2, expert=2),
    mix(4, "plain", tensor=2, expert=2),
    mix(4, "in sequence", tensor=2, expert=2),
    mix(4, "plain", tensor=4, expert=2),
    mix(4, "plain", tensor=2, expert=2, context=2),
    mix(6, "plain", tensor=2, expert=3),
    mix(6, "in sequence", tensor=2, expert=6),
    mix(8, "in sequence", tensor=2, expert=2, replicate=2),
    mix(8, "plain", tensor=2, expert=2, context=2, replicate=2),
    mix(4, pipeline=2, expert=2, schedule="gpipe"),
    mix(4, layers=4, pipeline=2, expert=2, schedule="interleaved"),
    mix(6, pipeline=2, expert=3),
    mix(8, pipeline=2, expert=2, replicate=2),
    mix(8, pipeline=2, expert=2, context=2),
    mix(8, layers=4, pipeline=4, expert=2),
    mix(8, "plain", pipeline=2, tensor=2, expert=2),
    mix(8, "in sequence", pipeline=2, tensor=2, expert=2, context=2),
)


# --- the page -------------------------------------------------------------------------------------

HEAD = """\
# Meshes beside one process
Written by `python docs/conformance.py meshes`. Each mesh trains a small model for some steps in
fp32, as processes of one machine over gloo: a decoder with tied weights, queries, keys and values
in one layer, and a vocabulary that nothing divides; or a mixture of experts. Beside one process
that does the same stand the largest differences that any rank saw: of the losses, the norms of the
gradient and the evaluations relative ones, of which 1e-5 is allowed; of the weights at the end,
and of what the whole model computes then, absolute ones, of which 1e-5 and 1e-4 of the value are.

| processes | dimensions | model | losses | norms | evaluations | weights |
| ---: | --- | --- | ---: | ---: | ---: | ---: |
"""


def row(each: Compared) -> str:
    """Return a row of the page."""
    seen, expected = each.compare()
    most = (
        f"{max(column):.1e}" for column in zip(*(apart(r, expected) for r in seen), strict=True)
    )
    return f"| {' | '.join([str(each.size), each.in_words, each.trained, *most])} |"


def apart(seen: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[float]:
    """Yield the largest deviations: relative ones of losses, norms and evaluations, absolute ones
    of weights.
    """
    for of in (lambda run: run["curve"], lambda run: run["measured"]):
        mine, other = (torch.tensor(of(run), dtype=torch.float64) for run in (seen, expected))
        relative = (mine - other).abs() / other.abs()
        yield from relative.amax(0).reshape(-1).tolist()
    yield max(
        float((tensor - expected["weights"][name]).abs().max())
        for name, tensor in seen["weights"].items()
    )


def main(file: Path) -> None:
    rows = []
    for each in MESHES:
        rows.append(row(each))
        print(rows[-1], flush=True)
    file.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
