"""Text of natural lengths: padded, brought together by length, and packed into rows."""

from __future__ import annotations

import ast
import functools
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .harness import Benchmark, Column, Measured, timed

LONGEST, SHORTEST = 512, 8
WIDTH, HEADS, LAYERS = 128, 4, 3
BATCH, MICRO_BATCH = 32, 16


@functools.cache
def texts(count: int) -> list[bytes]:
    """Docstrings of Python's own library, the first ones of its files in order of name."""
    found: list[bytes] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                text = (ast.get_docstring(node) or "").encode()[:LONGEST]
                if len(text) >= SHORTEST:
                    found.append(text)
        if len(found) >= count:
            return found[:count]
    raise ValueError(f"Python's library has {len(found)} docstrings, {count} are needed")


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self.texts = texts(count)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor(list(self.texts[index]))}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        rows, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        added: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return added


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.bytes(batch["input_ids"]) + self.positions(batch["position_ids"])
        for block in self.blocks:
            x = block(x, batch.get("attention_mask"))
        logits: Tensor = self.head(x)
        return logits


def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = module(batch)[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def padded(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad to the longest text of the microbatch. A causal model needs no mask for positions after a
    text.
    """
    from torch.nn.utils.rnn import pad_sequence

    ids = [sample["input_ids"] for sample in samples]
    rows = pad_sequence(ids, batch_first=True)
    labels = pad_sequence(ids, batch_first=True, padding_value=-100)
    labels[:, 0] = -100
    positions = torch.arange(rows.shape[1]).expand_as(rows)
    return {"input_ids": rows, "labels": labels, "position_ids": positions}


def measure(candidate: str, quick: bool) -> Measured:
    from drivetrain import DataSettings, Pack, Recipe, Settings
    from drivetrain.kernel.events import Logged
    from drivetrain.trainer.fit import fit

    torch.set_num_threads(1)
    data = Texts(320 if quick else 3200)
    pack = Pack(LONGEST)
    recipe = Recipe(
        model=Decoder,
        loss=loss,
        train_data=data,
        lengths=[len(text) for text in data.texts],
        collate=pack if candidate == "packed" else padded,
        count_items=Pack.count_items,
    )
    settings = Settings(
        global_batch=BATCH,
        micro_batch=BATCH if candidate == "packed" else MICRO_BATCH,
        log_every=10,
        data=DataSettings(by_length=50 if candidate == "by_length" else None),
    )
    events: list[Any] = []
    with timed() as clock:
        fit(recipe, settings, backend="cpu", observers=[events.append])
    items = [event for event in events if isinstance(event, Logged)][-1].items
    return {
        "items": items,
        "wall": clock.wall,
        "cpu": clock.cpu,
        "per_second": items / clock.wall,
    }


BENCHMARKS = (
    Benchmark(
        name="packing",
        title="Text of natural lengths",
        about=(
            f"A decoder of {LAYERS} layers, {WIDTH} wide, reads the bytes of docstrings of "
            f"Python's library ({SHORTEST} to {LONGEST} bytes each) once, {BATCH} texts a step, "
            "through the kernel. All read the same texts; padded and packed take the same ones in "
            f"each step, and have the same losses. A packed row holds {LONGEST} bytes under a "
            "dense mask. One thread."
        ),
        candidates={
            "padded": "padded to the longest",
            "by_length": "by length (`data.by_length`)",
            "packed": "packed (`Pack`)",
        },
        measure=measure,
        columns=(
            Column("bytes/s", "per_second", digits=0),
            Column("of padded", "per_second", ratio=True),
        ),
        plotted="of padded",
        equal="items",
    ),
)
