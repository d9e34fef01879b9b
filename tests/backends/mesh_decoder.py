"""A small decoder with everything that is awkward to partition, and its training on meshes.

Queries, keys and values are one layer. The embedding and the head are one matrix. The sizes of the
vocabulary (13) and of batches (7, 5) are prime. Some targets do not count.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mesh_faults import plant
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain import Parallel, Recipe, lora
from drivetrain.backends.fsdp import dtensor
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.law_1_gradient import LOSS_ROUNDINGS, ROUNDING
from drivetrain.conformance.state import assemble, pieces
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.events import Evaluated, Logged

WIDTH, HEADS, LENGTH, VOCABULARY = 24, 4, 8, 13
IGNORED = -100

TENSOR: dict[str, Any] = {
    "embed": "vocabulary",
    "head": "vocabulary",
    "blocks.*.qkv": "column",
    "blocks.*.out": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
}
PARALLEL = Parallel(
    tensor=TENSOR,
    fused={"blocks.*.qkv": 3},
    sequence={"tokens": 1, "targets": 1},
    positions="positions",
)
IN_SEQUENCE = dataclasses.replace(
    PARALLEL, tensor={**TENSOR, "blocks.*.norm?": "sequence", "norm": "sequence"}
)
PLANS = {
    "plain": PARALLEL,
    "in sequence": IN_SEQUENCE,
    "logits": dataclasses.replace(IN_SEQUENCE, tensor={**IN_SEQUENCE.tensor, "head": "logits"}),
}


class Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.size = WIDTH // heads
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        turned = (turn(query, angles), turn(key, angles), value)
        mixed = F.scaled_dot_product_attention(*turned, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class Scaled(nn.Linear):
    """A linear layer whose output is scaled by a tensor that is not one of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.ones(self.out_features)


def scaled(decoder: nn.Module) -> nn.Module:
    for block in decoder.get_submodule("blocks"):
        block.up = Scaled(WIDTH, 48)
    return decoder


def adapted(decoder: nn.Module) -> nn.Module:
    """Add adapters that have an effect from the first step on, so that faults show."""
    changed = lora(decoder, "qkv|out|up|down", rank=3)
    for name, weight in changed.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(weight, std=0.3)
    return changed


def drawing(decoder: nn.Module) -> nn.Module:
    def draw(block: nn.Module, *given: Any) -> None:
        if block.training:
            DRAWN["block"].append((0, float(torch.rand(()))))

    for block in decoder.get_submodule("blocks"):
        block.register_forward_pre_hook(draw)
    return decoder


CHANGES = {
    "": lambda decoder: decoder,
    "adapted": adapted,
    "drawing": drawing,
    "scaled": scaled,
}


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary positions (https://arxiv.org/abs/2104.09864)."""
    left, right = x.chunk(2, -1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([left * cosine - right * sine, left * sine + right * cosine], -1)


class Decoder(nn.Module):
    def __init__(self, heads: int = HEADS, layers: int = 2, tied: bool = True) -> None:
        super().__init__()
        self.half = WIDTH // heads // 2
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(heads) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.3)
        self.register_buffer("speeds", 100.0 ** (-torch.arange(self.half) / self.half))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        angles = (positions[..., None] * self.speeds)[:, None]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, angles)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    logits = module(batch["tokens"], batch.get("positions"))
    targets = batch["targets"].flatten()
    return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum", ignore_index=IGNORED)


def forgets_positions(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return loss(module, {name: batch[name] for name in ("tokens", "targets")})


def mean(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return loss(module, batch) / len(batch["targets"].flatten())


def twice(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return (loss(module, batch) + loss(module, batch)) / 2


def own_step_of(
    summed: Callable[..., Tensor], module: nn.Module, batch: Mapping[str, Tensor], microstep: Any
) -> Tensor:
    with microstep.autocast():
        loss = summed(module, batch)
    done: Tensor = microstep.backward(loss, microstep.num_feeders / microstep.num_items())
    return done


def of_parts(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of two cross entropies: one with the classes in the second dimension, one by
    rows. In training the logits are partitioned.
    """
    logits = module(batch["tokens"], batch.get("positions"))
    if module.training and isinstance(module.get_parameter("head.weight"), DTensor):
        assert logits.to_local().shape[-1] < logits.shape[-1] == VOCABULARY
    first = nn.CrossEntropyLoss(reduction="sum")(logits.transpose(1, 2), batch["targets"])
    targets = batch["targets"].flatten()
    each = F.cross_entropy(
        logits.float().view(-1, VOCABULARY), targets, reduction="none", ignore_index=IGNORED
    )
    return (first + each.sum()) / 2


DRAWN: dict[str, list[tuple[int, float]]] = {"loss": [], "block": []}
"""Random draws of this process in training, each with the sum of its microbatch's tokens."""


def noisy(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return a loss like a diffusion model's: the model's input and the loss depend on the same
    random draw.
    """
    drawn = torch.rand(())
    if module.training:
        DRAWN["loss"].append((int(batch["tokens"].sum()), float(drawn)))
    return loss(module, batch) * (0.5 + drawn)


def by_hand(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    logits = module(batch["tokens"], batch.get("positions"))
    return -logits.flatten(0, 1).log_softmax(-1)[:, 0].sum()


LOSSES = {
    each.__name__: each for each in (loss, forgets_positions, mean, twice, of_parts, noisy, by_hand)
}


def count_items(batch: Mapping[str, Tensor]) -> int:
    return int((batch["targets"] != IGNORED).sum())


class Sequences:
    def __init__(self, size: int = 40, length: int = LENGTH) -> None:
        self.size, self.length = size, length

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(0, VOCABULARY, (self.length + 1,), generator=generator)
        row = (row + torch.arange(self.length + 1)) % VOCABULARY
        targets = row[1:].clone()
        targets[: index % 4] = IGNORED
        return {"tokens": row[:-1], "targets": targets}


# --- a fault that is the recipe's -----------------------------------------------------------------


def normalisation_left_out() -> None:
    plan = {**IN_SEQUENCE.tensor}
    del plan["blocks.*.norm?"]
    PLANS["in sequence"] = dataclasses.replace(IN_SEQUENCE, tensor=plan)


def train(
    bench: Bench,
    *,
    steps: int = 6,
    plan: str = "plain",
    heads: int = HEADS,
    layers: int = 2,
    tied: bool = True,
    changed: str = "",
    length: int = LENGTH,
    lossy: str = "loss",
    own_step: bool = False,
    settings: Mapping[str, Any] | None = None,
    optimizer: Any = None,
    out: str | None = None,
    resume: str | None = None,
    fault: str = "",
    **changes: Any,
) -> dict[str, Any]:
    """A job: train; return the curve, the results of an evaluation, and the final weights."""
    if fault == "a normalisation left out":
        normalisation_left_out()
    elif fault:
        plant(fault)
    parts = {
        "model": lambda: CHANGES[changed](Decoder(heads, layers, tied)),
        "loss": LOSSES[lossy],
        "parallel": dataclasses.replace(PLANS[plan], **changes),
        "step": functools.partial(own_step_of, LOSSES[lossy]) if own_step else None,
        "optimizer": optimizer,
    }
    chosen = {"steps": steps, **(settings or {})}
    return observed(bench, parts, chosen, length=length, out=out, resume=resume)


def draws(bench: Bench, **arguments: Any) -> dict[str, list[tuple[int, float]]]:
    """A job: return the sorted random numbers that the loss and the blocks of this rank draw in a
    training.
    """
    for each in DRAWN.values():
        each.clear()
    train(bench, lossy="noisy", changed="drawing", **arguments)
    return {name: sorted(each) for name, each in DRAWN.items()}


def observed(
    bench: Bench,
    parts: Mapping[str, Any],
    settings: Mapping[str, Any],
    length: int = LENGTH,
    **arguments: Any,
) -> dict[str, Any]:
    """Run `fit`. Return the loss and norm of each step, the results of evaluations, and at the end
    the weights and the outputs of the whole module.
    """
    recipe = Recipe(
        train_data=Sequences(length=length),
        eval_data={"held out": Sequences(9, length)},
        count_items=count_items,
        **parts,
    )
    logged: list[tuple[float, float]] = []
    measured: list[float] = []

    def observe(event: object) -> None:
        if isinstance(event, Logged):
            logged.append((event.loss, event.grad_norm))
        elif isinstance(event, Evaluated):
            measured.append(event.metrics["loss"])

    def finish(module: nn.Module) -> dict[str, Tensor]:
        model = recipe.model()
        assert type(module) is type(model)
        assert names_of(module) == names_of(model), "what was tied is not, or the other way round"
        with torch.no_grad():
            found = module(torch.arange(LENGTH)[None])
        logits = found if isinstance(found, Tensor) else found[0]
        state = {
            name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()
        }
        return {**state, "logits": logits.cpu()}

    chosen = {
        "global_batch": 12, "micro_batch": 3, "log_every": 1, "max_grad_norm": 1.0,
        "optimizer.lr": 1e-2, "schedule.name": "constant", "evaluate.every": 3, "seed": 5,
        **settings,
    }  # fmt: skip
    result = bench.fit(recipe, chosen, observers=[observe], finish=finish, **arguments)
    return {"curve": logged, "measured": measured, "weights": result.finish}


def held(bench: Bench, **arguments: Any) -> dict[str, dict[str, Any]]:
    """A job: train; return, for each weight that takes memory on this rank, its part and the part's
    offsets in the whole weight.
    """
    trained: dict[str, nn.Parameter] = {}

    def optimizer(named: Any) -> torch.optim.Optimizer:
        trained.update(named)
        return adamw(trained.items())

    train(bench, optimizer=optimizer, **arguments)
    found = {}
    for name, weight in trained.items():
        part = dtensor.own_part(weight)
        if part.untyped_storage().nbytes() >= part.numel() * part.element_size():
            start = dtensor.own_box(weight).offsets if isinstance(weight, DTensor) else ()
            found[name] = {"start": list(start), "part": part.cpu().clone()}
    return found


def names_of(module: nn.Module) -> list[str]:
    """Return the names of a module's parameters, one for each."""
    return [name for name, _ in module.named_parameters()]


def parts(bench: Bench, *, source: str) -> Sequence[dict[str, Any]]:
    """A job: restore a checkpoint, and return what this rank would save."""
    return parts_of(bench, Recipe(model=Decoder, loss=loss, parallel=PARALLEL), source)


def parts_of(bench: Bench, recipe: Recipe, source: str) -> Sequence[dict[str, Any]]:
    """Restore a checkpoint into the recipe's model, and return what this rank would save."""
    from drivetrain.checkpoint import CheckpointReader

    recipe = dataclasses.replace(recipe, optimizer=adamw)
    with bench.open() as session:
        engine = session.prepare(recipe)
        engine.restore(CheckpointReader(source))
        return pieces(engine)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2)


# --- what is held of them ------------------------------------------------------------------------


def mesh(size: int, **dimensions: Any) -> Subject:
    return Subject("mesh", size, dimensions)


def assert_alike(seen: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    torch.testing.assert_close(seen["curve"], expected["curve"], rtol=1e-5, atol=0)
    torch.testing.assert_close(seen["measured"], expected["measured"], rtol=1e-5, atol=0)
    torch.testing.assert_close(seen["weights"], expected["weights"], rtol=1e-4, atol=1e-5)


def assert_near(
    curve: Sequence[Sequence[float]], expected: Sequence[Sequence[float]], precision: str
) -> None:
    """Require losses and norms near the expected ones, in a precision of few bits.

    The bound is the number of roundings that law 1 derives for AdamW (`LOSS_ROUNDINGS`). It fits
    norms, too. An element of a gradient comes from some 28 products, forward and backward through
    two blocks and a head. They are rounded as often up as down, which leaves about sqrt(28) = 5.3
    roundings of one. A norm adds up the squares of thousands of elements, among which these cancel
    again.
    """
    bound = LOSS_ROUNDINGS["AdamW"] * ROUNDING[precision]
    torch.testing.assert_close(curve, expected, rtol=bound, atol=0)


def assert_resumed(
    jobs: Any,
    first: Subject,
    then: Subject,
    steps: int,
    whole: Mapping[str, Any],
    out: Path,
    **arguments: Any,
) -> None:
    """Require that `then` resumes what `first` saved after `steps` steps: weights and moments are
    bit-equal, and the curve continues that of the whole run. `jobs` has a job `train`, which
    receives the arguments, and a job `parts`.
    """
    first.run(jobs.train, steps=steps, out=str(out), **arguments)
    source = str(out / "checkpoints" / f"checkpoint-{steps:06}")
    stored, read = (
        assemble(subject.run(jobs.parts, source=source)) for subject in (Subject("cpu"), then)
    )
    for kind in ("weights", "optimizer"):
        assert stored[kind].keys() == read[kind].keys()
        assert all(torch.equal(stored[kind][name], read[kind][name]) for name in stored[kind])
    resumed = then.run(jobs.train, resume=source, **arguments)[0]
    torch.testing.assert_close(resumed["curve"], whole["curve"][steps:], rtol=1e-5, atol=0)
