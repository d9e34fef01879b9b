"""Small things to train on, each with one difficulty that a driver can get wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.parallel import Parallel
from ..kernel.recipe import Recipe
from .decoders import LENGTH, VOCABULARY, WIDTH, AllChosenModel, LanguageModel, MixtureModel
from .experts import InParts
from .remembering import Remembering

__all__ = ["KINDS_OF_DATA", "PROBLEMS", "Problem", "Samples", "collate", "inside"]

Sample = dict[str, Tensor]


@dataclass(frozen=True)
class Samples:
    """`size` samples, each a pure function of its index, which it carries as `id`."""

    problem: str
    size: int
    poison: int | None = None
    """Index of a sample whose first input is not a number."""

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        sample = PROBLEMS[self.problem].draw(index)
        if index == self.poison:
            sample["x"] = sample["x"].index_fill(0, torch.tensor(0), float("nan"))
        return sample


@dataclass
class Stream:
    """Samples that can be read from the front only."""

    samples: Samples

    def __iter__(self) -> Iterator[Sample]:
        return (self.samples[index] for index in range(len(self.samples)))


@dataclass
class StatefulStream(Stream):
    """A stream that can resume at its last position."""

    at: int = 0

    def __iter__(self) -> Iterator[Sample]:
        start, self.at = self.at, 0
        for index in range(start, len(self.samples)):
            self.at = index + 1
            yield self.samples[index]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.at = state["at"]


KINDS_OF_DATA: dict[str, Callable[[Samples], Any]] = {
    "indexed": lambda samples: samples,
    "stream": Stream,
    "stateful": StatefulStream,
}


def collate(samples: list[Sample]) -> Sample:
    """Stack the tensors of the samples, which have one size within a problem."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


@dataclass(frozen=True)
class Problem:
    """A model, a source of samples, and measures, all of which are sums over the batch."""

    model: Callable[[], nn.Module]
    sample: Callable[[torch.Generator], Sample]
    measure: Callable[[nn.Module, Sample], dict[str, Tensor]]
    """Returns the `loss`, and other sums."""
    count_items: Callable[[Sample], int] | None = None
    trained_layer: str = "Linear"
    """Class name of a submodule whose activations can be recomputed."""
    parallel: Parallel = field(default_factory=Parallel)
    """Partition plan, for drivers that partition layers or sequences."""
    stand_in: str | None = None
    """Problem to use where a driver's options cannot partition this one: one that has layers,
    sequences and experts.
    """

    def draw(self, index: int) -> Sample:
        """Return the sample of that index, which it carries as `id`."""
        generator = torch.Generator().manual_seed(1000 + index)
        return {"id": torch.tensor(index), **self.sample(generator)}

    def batch(self, indices: Iterable[int]) -> Sample:
        """Return the batch of these samples."""
        return collate([self.draw(index) for index in indices])

    def loss(self, module: nn.Module, batch: Sample) -> Tensor:
        return self.measure(module, batch)["loss"]

    def items(self, batch: Sample) -> int:
        return len(batch["id"]) if self.count_items is None else self.count_items(batch)

    def recipe(self, **parts: Any) -> Recipe:
        """Build the recipe for a driver; `parts` replace its defaults."""
        defaults: dict[str, Any] = {
            "model": self.model,
            "loss": self.loss,
            "measure": self.measure,
            "count_items": self.count_items,
            "collate": collate,
            "summarise": summarise,
            "parallel": self.parallel,
        }
        return Recipe(**{**defaults, **parts})


def summarise(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the mean loss, and the sums of all other measures, so that a sample too many shows."""
    flat = {
        f"{name}[{index}]" if value.dim() else name: float(figure)
        for name, value in sums.items()
        for index, figure in enumerate(value.reshape(-1))
    }
    return {**flat, "loss": flat["loss"] / flat["items"]}


def at_least_float32(output: Tensor) -> Tensor:
    """Cast outputs below float32: losses are summed in float32, or in the oracle's float64."""
    return output if output.dtype == torch.float64 else output.float()


# --- regression: batches of any size ---------------------------------------------------------


def regression_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def regression_sample(generator: torch.Generator) -> Sample:
    x = torch.randn(6, generator=generator)
    return {"x": x, "y": torch.stack((x[0] * x[1], x[2:4].sum(), x[4] - x[5] ** 2))}


def squared_error(module: nn.Module, batch: Sample) -> dict[str, Tensor]:
    return {"loss": (at_least_float32(module(batch["x"])) - batch["y"]).square().sum()}


# --- language, and a mixture of experts: tied weights, items that are not samples --------------

IGNORED = -100


def language_sample(generator: torch.Generator) -> Sample:
    length = int(torch.randint(2, LENGTH + 1, (), generator=generator))
    tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
    labels = (3 * tokens + 1) % VOCABULARY
    labels[length:] = IGNORED
    return {"x": tokens, "y": labels}


def language_loss(module: nn.Module, batch: Sample) -> dict[str, Tensor]:
    logits = at_least_float32(module(batch["x"], batch.get("positions")))
    loss = functional.cross_entropy(
        logits.flatten(0, 1), batch["y"].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return {"loss": loss}


def count_tokens(batch: Sample) -> int:
    return int((batch["y"] != IGNORED).sum())


DECODER = Parallel(
    tensor={
        "embedding": "vocabulary",
        "head": "vocabulary",
        "blocks.*.qkv": "column",
        "blocks.*.out": "row",
    },
    fused={"blocks.*.qkv": 3},
    sequence={"x": 1, "y": 1},
    positions="positions",
)
"""Partition plan of the layers that both models have."""


# --- classification: convolutions, and metrics besides the loss -------------------------------

CLASSES = 4


def classification_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 8, CLASSES)
    )


def classification_sample(generator: torch.Generator) -> Sample:
    x = torch.randn(1, 8, generator=generator)
    return {"x": x, "y": x.view(CLASSES, 2).sum(1).argmax()}


def classification_measure(module: nn.Module, batch: Sample) -> dict[str, Tensor]:
    logits = at_least_float32(module(batch["x"])).flatten(0, -2)
    y = batch["y"].flatten()
    right = logits.argmax(-1) == y
    return {
        "loss": functional.cross_entropy(logits, y, reduction="sum"),
        "right": right.sum(),
        "right_by_class": torch.zeros(CLASSES, device=y.device).index_add_(0, y, right.float()),
    }


# --- dropout: random numbers and a buffer in the forward --------------------------------------


class Dropout(nn.Module):
    """Regression with dropout, which counts its forwards in training. One weight lies column by
    column in memory, like weights in `channels_last`.
    """

    num_forwards: Tensor
    sides: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 3))
        weight = self.body.get_parameter("0.weight")
        weight.data = weight.data.t().contiguous().t()
        self.register_buffer("num_forwards", torch.zeros(()))
        self.register_buffer("sides", torch.ones(1).expand(3))  # all elements are one in memory

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_forwards += 1
        y: Tensor = self.body(x) * self.sides
        return y


# --- normalisation: buffers that are made of what a rank has seen -----------------------------


class Normalised(nn.Module):
    """Regression with batch normalisation, whose layers are not registered in the order of their
    use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * WIDTH, 3)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))
        self.first = nn.Conv1d(2, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.view(-1, 2, 3))  # one sample has a variance, too
        for norm, layer in zip(self.norms, self.layers, strict=True):
            hidden = hidden + layer(norm(hidden)).tanh()
        y: Tensor = self.head(hidden.flatten(1))
        return y


# --- scaled: a parameter of no dimension -------------------------------------------------------


class Scaled(nn.Module):
    """Regression with a learnt scale, like the scale of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.25))
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x) * self.scale.exp()
        return y


# --- in parts: what cannot be sharded as it is --------------------------------------------------


def inside(name: str, parallel: Parallel) -> Parallel:
    """Return the partition plan of a model for the case that it is a submodule of that name."""
    return replace(
        parallel,
        tensor={f"{name}.{pattern}": how for pattern, how in parallel.tensor.items()},
        fused={f"{name}.{pattern}": parts for pattern, parts in parallel.fused.items()},
        experts=[f"{name}.{pattern}" for pattern in parallel.experts],
        stages=[f"{name}.{pattern}" for pattern in parallel.stages],
    )


def in_parts(problem: Problem, width: int) -> Problem:
    """Return the problem on sequences of two positions, with experts after its model, whose outputs
    have that width.
    """
    return replace(
        problem,
        model=lambda: InParts(problem.model(), width),
        sample=lambda generator: collate([problem.sample(generator) for _ in range(2)]),
        parallel=replace(
            inside("model", problem.parallel), experts=["experts"], sequence={"x": 1, "y": 1}
        ),
    )


PROBLEMS: dict[str, Problem] = {
    "regression": Problem(
        regression_model,
        regression_sample,
        squared_error,
        parallel=Parallel(tensor={"0": "column", "2": "row"}, stages=["?"]),
        stand_in="regression in parts",
    ),
    "language": Problem(
        LanguageModel,
        language_sample,
        language_loss,
        count_tokens,
        trained_layer="Block",
        parallel=replace(
            DECODER,
            tensor={**DECODER.tensor, "blocks.*.mlp.0": "column", "blocks.*.mlp.2": "row"},
        ),
        stand_in="language in parts",
    ),
    "mixture": Problem(
        MixtureModel,
        language_sample,
        language_loss,
        count_tokens,
        trained_layer="MixtureBlock",
        parallel=replace(DECODER, experts=["blocks.*.experts"]),
        stand_in="mixture",
    ),
    "classification": Problem(
        classification_model,
        classification_sample,
        classification_measure,
        parallel=Parallel(tensor={"3": "vocabulary"}, stages=["?"]),
        stand_in="classification in parts",
    ),
    "dropout": Problem(
        Dropout,
        regression_sample,
        squared_error,
        parallel=Parallel(tensor={"body.0": "vocabulary"}, stages=["body.?"]),
        stand_in="dropout in parts",
    ),
    "scaled": Problem(
        Scaled,
        regression_sample,
        squared_error,
        parallel=Parallel(tensor={"body.0": "column", "body.2": "row"}, stages=["body.?"]),
        stand_in="scaled in parts",
    ),
    "remembering": Problem(
        Remembering,
        regression_sample,
        squared_error,
        parallel=Parallel(tensor={"body.0.1": "vocabulary"}, stages=["body.?"]),
        stand_in="remembering in parts",
    ),
    "normalised": Problem(
        Normalised,
        regression_sample,
        squared_error,
        parallel=Parallel(tensor={"head": "vocabulary"}),
    ),
}
WIDTHS = {"regression": 3, "classification": CLASSES, "dropout": 3, "scaled": 3, "remembering": 3}
"""Width of each problem's outputs."""
PROBLEMS |= {f"{name} in parts": in_parts(PROBLEMS[name], width) for name, width in WIDTHS.items()}
PROBLEMS["language in parts"] = replace(
    PROBLEMS["mixture"],
    model=AllChosenModel,
    trained_layer="AllChosenBlock",
    stand_in="language in parts",
)
