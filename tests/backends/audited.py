"""Recipes that compute something else when their model is partitioned. Nothing shows it at the
start, since residual branches and logits are zero there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain import Models, Parallel, Recipe, Turns
from drivetrain.conformance.bench import Bench
from drivetrain.kernel.errors import RecipeError
from drivetrain.kernel.events import Saved, StepEnded

WIDTH, HEADS, VOCABULARY, LENGTH = 24, 4, 13, 8
PARALLEL = Parallel(
    tensor={
        "*.qkv": "column",
        "*.out": "row",
        "*.up": "column",
        "*.down": "row",
    },
    fused={"*.qkv": 3},
    sequence={"tokens": 1, "targets": 1},
    positions="positions",
)
AROUND: Any = dict.fromkeys(("embed", "place", "head"), "vocabulary")
IN_SEQUENCE = dataclasses.replace(
    PARALLEL, tensor={**PARALLEL.tensor, **AROUND, "*norm": "sequence"}
)
CONVOLVED = {"convolved": 1.0, "convolved a little": 1e-3}
"""Factors of convolutions over positions, by the kinds of blocks that have one."""


class Block(nn.Module):
    """A block that is awkward to partition; `kind` says how."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.size = kind, WIDTH // HEADS
        groups = HEADS // 2 if kind == "grouped" else HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * groups) * self.size)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.gain = nn.Parameter(torch.ones(()))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1) if kind in CONVOLVED else None
        self.kept: Any = 0.0
        for last in (self.out, self.down):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        if self.kind == "centred":
            normed = normed - normed.mean(1, keepdim=True)
        if self.conv is not None:
            convolved = self.conv(normed.transpose(1, 2)).transpose(1, 2)
            normed = normed + CONVOLVED[self.kind] * convolved
        self.kept = normed.square().mean() * len(normed)
        x = x + self.out(self._mixed(self.qkv(normed)))
        hidden = F.gelu(self.up(self.norm(x)))
        found: Tensor = x + self.down(hidden * self.gain if self.kind == "gain" else hidden)
        return found

    def _mixed(self, fused: Tensor) -> Tensor:
        heads = fused.unflatten(-1, (-1, self.size)).transpose(1, 2)
        queries = heads.shape[1] // 2 if self.kind == "grouped" else heads.shape[1] // 3
        sizes = [queries, *[(heads.shape[1] - queries) // 2] * 2]
        query, key, value = heads.split(sizes, 1)
        key, value = (each.repeat_interleave(queries // each.shape[1], 1) for each in (key, value))
        if self.kind == "by hand":
            scores = (query @ key.transpose(-1, -2) / self.size**0.5).softmax(-1)
            mixed = scores @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None or self.kind == "nowhere":
            positions = torch.arange(tokens.shape[1])[None]
        x = self.embed(tokens)
        if self.kind != "no places":
            x = x + self.place(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Later:
    """A loss with an auxiliary term, which blocks keep for it, from the step `first` on. Before
    that step the term has the weight `weight_before`, or is left out.
    """

    steps_done = 0

    def __init__(self, first: int, weight_before: float | None = None) -> None:
        self.first, self.before = first, weight_before

    def __call__(self, module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        found = plain(module, batch)
        weight = 0.1 if Later.steps_done + 1 >= self.first else self.before
        if weight is None:
            return found
        blocks: Any = module.get_submodule("blocks")
        return found + weight * sum(block.kept for block in blocks)


def plain(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    logits = module(batch["tokens"], batch.get("positions"))
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")


def of_first(models: Models, batch: Mapping[str, Tensor]) -> Tensor:
    return plain(models["first"], batch)


def of_second(models: Models, batch: Mapping[str, Tensor]) -> Tensor:
    return plain(models["second"], batch)


class Rows:
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)
        return {"tokens": row[:-1], "targets": row[1:]}


def _recipe(kind: str, parallel: Parallel, loss: Callable[..., Tensor] = plain) -> Recipe:
    return Recipe(model=lambda: Decoder(kind), loss=loss, parallel=parallel, train_data=Rows())


def _turns() -> Recipe:
    """Return a recipe of two turns. The model of the second turn has a gain that the plan does not
    name.
    """
    parts = {"first": Decoder(""), "second": Decoder("gain")}
    return Recipe(
        model=lambda: Models(parts),
        loss=Turns({"first": of_first, "second": of_second}),
        parallel=PARALLEL,
        train_data=Rows(),
    )


RECIPES: Mapping[str, Callable[[], Recipe]] = {
    "right": lambda: _recipe("", PARALLEL),
    "right in sequence": lambda: _recipe("", IN_SEQUENCE),
    "fused without a name": lambda: _recipe("", dataclasses.replace(PARALLEL, fused={})),
    "fused groups": lambda: _recipe("grouped", dataclasses.replace(PARALLEL, fused={"*.qkv": 4})),
    "a mean over parts": lambda: _recipe("centred", IN_SEQUENCE),
    "a gain without a name": lambda: _recipe("gain", PARALLEL),
    "turns": _turns,
    "no positions": lambda: _recipe("nowhere", PARALLEL),
    "attention by hand": lambda: _recipe("by hand", PARALLEL),
    "a mean over positions": lambda: _recipe("centred", PARALLEL),
    "a convolution over positions": lambda: _recipe("convolved", PARALLEL),
    "a convolution that adds little": lambda: _recipe("convolved a little", PARALLEL),
    "kept for the loss, from step 6 on": lambda: _recipe("", IN_SEQUENCE, Later(6)),
    "kept for the loss, counting nothing": lambda: _recipe("", IN_SEQUENCE, Later(99, 0.0)),
}


def refusals(
    bench: Bench, *, names: list[str], out: str, precision: str = "fp32"
) -> dict[str, tuple[str, list[int]]]:
    """A job: return, for each recipe, the message of the refusal and the steps that were saved
    before it.
    """
    found = {}
    for name in names:
        saved: list[int] = []

        def observe(event: object, saved: list[int] = saved) -> None:
            if isinstance(event, Saved):
                saved.append(event.step)
            elif isinstance(event, StepEnded):
                Later.steps_done = event.step

        settings = {
            "steps": 8, "global_batch": 4, "log_every": 100, "checkpoint.every": 7,
            "optimizer.lr": 1e-2, "schedule.name": "constant", "precision": precision,
        }  # fmt: skip
        Later.steps_done = 0
        try:
            bench.fit(RECIPES[name](), settings, out=f"{out}/{name}", observers=[observe])
        except RecipeError as error:
            found[name] = str(error), saved
        else:
            found[name] = "", saved
    return found
