"""A step of a model with many equal blocks, run with a few of them: the same as the whole one's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn, tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from drivetrain import OptimizerSettings, Parallel, Recipe, Settings
from drivetrain.registry import find_driver
from drivetrain.symbolic.equal_blocks import EqualBlocks, find_equal_blocks
from drivetrain.symbolic.first_batch import first_batch
from drivetrain.symbolic.step import NotSymbolic, SymbolicStep, symbolic_step
from drivetrain.symbolic.trace import Trace, added_part, with_more_blocks

WIDTH, DEPTH = 32, 12
SETTINGS = Settings(steps=4, global_batch=16)


class Block(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH, bias), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


class Model(nn.Module):
    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 500)
        self.blocks = nn.ModuleList(self.block(index) for index in range(depth))

    def block(self, index: int) -> nn.Module:
        return Block()

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def summed(module: nn.Module, batch: tuple[Tensor]) -> Tensor:
    result: Tensor = module(batch[0]).float().square().flatten(1).mean(1).sum()
    return result


def recipe_of(model: Callable[[], nn.Module], **changes: Any) -> Recipe:
    tokens = torch.randint(0, 100, (64, 8), generator=torch.Generator())
    parallel = Parallel(tensor={"*.up": "column", "*.down": "row"})
    return replace(Recipe(model, summed, TensorDataset(tokens), parallel=parallel), **changes)


RECIPE = recipe_of(Model)


def found(
    blocks: EqualBlocks | None,
    recipe: Recipe = RECIPE,
    backend: str = "cpu",
    num_ranks: int = 1,
    settings: Settings = SETTINGS,
    **options: Any,
) -> SymbolicStep:
    driver = find_driver(backend)
    plan = settings.plan(driver.options_type(**options))
    batch_of = partial(first_batch, recipe, settings)
    return symbolic_step(recipe, driver, plan, settings, num_ranks, batch_of, blocks)


@contextmanager
def counting_depths() -> Iterator[Counter[int]]:
    """Yield the number of forwards by the number of blocks of the model."""
    counted, forward = Counter[int](), Model.forward

    def counting(model: Model, x: Tensor) -> Any:
        counted[len(model.blocks)] += 1
        return forward(model, x)

    with patch.object(Model, "forward", counting):
        yield counted


def check_same(recipe: Recipe = RECIPE, runs_whole: bool = False, **arguments: Any) -> None:
    """Check that the step is the whole model's, and which models were run."""
    blocks = find_equal_blocks(recipe)
    assert blocks is not None and blocks.depth == DEPTH
    with counting_depths() as counted:
        few = found(blocks, recipe, **arguments)
    assert (DEPTH in counted) == runs_whole, counted
    whole = found(None, recipe, **arguments)
    assert few.bytes == whole.bytes
    assert Counter(few.operations) == Counter(whole.operations)
    assert Counter(few.messages) == Counter(whole.messages)
    assert few == replace(whole, operations=few.operations, messages=few.messages)


ACCUMULATING = replace(SETTINGS, micro_batch=1)
RECOMPUTING = replace(ACCUMULATING, activation_checkpointing=("Block",))
UNCLIPPED = replace(SETTINGS, max_grad_norm=None)
SGD = OptimizerSettings(name="torch.optim.SGD", lr=1)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                {"settings": replace(RECOMPUTING, precision="bf16")},
                {"backend": "fsdp", "num_ranks": 8, "settings": SETTINGS},
                {"settings": replace(SETTINGS, optimizer=SGD)},
                {"settings": replace(UNCLIPPED, activation_checkpointing=("blocks.*",))},
                {"backend": "ddp", "num_ranks": 8, "settings": ACCUMULATING},
                {
                    "backend": "fsdp",
                    "num_ranks": 8,
                    "settings": replace(ACCUMULATING, precision="bf16"),
                },
                {"backend": "fsdp", "num_ranks": 8, "settings": RECOMPUTING},
                {"backend": "fsdp", "num_ranks": 8, "reshard_after_forward": False},
                {"backend": "fsdp", "num_ranks": 8, "shard_size": 2, "settings": ACCUMULATING},
                {
                    "backend": "fsdp",
                    "num_ranks": 8,
                    "sync_each_microbatch": True,
                    "settings": ACCUMULATING,
                },
                {"backend": "fsdp", "num_ranks": 8, "cpu_offload": True},
                {"backend": "mesh", "num_ranks": 8, "tensor": 2, "settings": RECOMPUTING},
                {"backend": "mesh", "num_ranks": 8, "tensor": 2, "replicate": 2, "shard": 2},
            )
        ),
    ],
    ids=str,
)
def test_a_few_blocks_show_the_whole_step(arguments: dict[str, Any]) -> None:
    check_same(**arguments)


class Listed(Model):
    """The blocks are in a list with others."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.Sequential(nn.Tanh(), *(Block() for _ in range(DEPTH)), nn.Tanh())


def test_blocks_beside_other_modules_of_a_list_are_found() -> None:
    blocks = find_equal_blocks(recipe := recipe_of(Listed))
    assert blocks is not None and blocks.depth == DEPTH
    assert found(blocks, recipe) == found(None, recipe)
    assert len(blocks.shortened(3).model().blocks) == 5  # type: ignore[arg-type]


# --- models without equal blocks ------------------------------------------------------------------


class Alternating(Model):
    def block(self, index: int) -> nn.Module:
        return Block(bias=bool(index % 2))


class Shared(Model):
    """Each second block has the weights of the one before."""

    def block(self, index: int) -> nn.Module:
        block = Block()
        if index % 2:
            block.up = self.last.up  # type: ignore[union-attr, assignment]
        object.__setattr__(self, "last", block)
        return block


class Tapped(Model):
    """One of the blocks in the middle has another output, too."""

    def forward(self, x: Tensor) -> Any:
        x, tapped = self.embed(x), torch.zeros(())
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == DEPTH // 2:
                tapped = torch.tanh(x).mean()
        return self.head(x) + tapped


class Stacked(Model):
    """The head sees the outputs of all blocks."""

    def forward(self, x: Tensor) -> Any:
        outputs = [self.embed(x)]
        for block in self.blocks:
            outputs.append(block(outputs[-1]))
        return self.head(torch.stack(outputs).mean(0))


class Checkpointed(Model):
    """Every second block recomputes its activations."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if index % 2 else block(x)
        return self.head(x)


class Frozen(Model):
    """The lower half is not trained, and keeps no activations."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            with torch.set_grad_enabled(index >= DEPTH // 2):
                x = block(x)
        return self.head(x)


class Numbered(Model):
    """The number of blocks is written down elsewhere."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for index in range(DEPTH):
            x = self.blocks[index](x)
        return self.head(x)


def _no_step(module: nn.Module, batch: Any, microstep: Any) -> Tensor:
    raise AssertionError("not called")


@pytest.mark.parametrize(
    "recipe",
    [
        *map(recipe_of, (Alternating, Shared, Tapped, Stacked, Checkpointed, Frozen, Numbered)),
        recipe_of(partial(Model, 5)),
        recipe_of(lambda: nn.Linear(3, 3)),
        recipe_of(Model, step=_no_step),
        recipe_of(lambda: 1 / 0),  # type: ignore[arg-type, return-value]
    ],
    ids=lambda recipe: getattr(recipe.model, "__name__", "few"),
)
def test_blocks_that_are_not_equal_or_too_few_are_all_run(recipe: Recipe) -> None:
    assert find_equal_blocks(recipe) is None


def test_nothing_is_logged_of_a_model_that_needs_all_of_its_blocks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Joined(Model):
        """The head sees all outputs beside each other."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(DEPTH * WIDTH, 10)

        def forward(self, x: Tensor) -> Any:
            x = self.embed(x)
            return self.head(torch.cat([block(x) for block in self.blocks], -1))

    assert find_equal_blocks(recipe_of(Joined)) is None
    assert caplog.records == []


def test_blocks_whose_backward_differs_are_all_run() -> None:
    class Hooked(Model):
        """Gradients of every second block are doubled."""

        def forward(self, x: Tensor) -> Any:
            x = self.embed(x)
            for index, block in enumerate(self.blocks):
                x = block(x)
                if index % 2:
                    x.register_hook(lambda gradient: 2 * gradient)
            return self.head(x)

    recipe = recipe_of(Hooked)
    blocks = find_equal_blocks(recipe)
    assert blocks is not None  # its forward has the same operations
    assert found(blocks, recipe) == found(None, recipe)


# --- settings and drivers that need the whole model -----------------------------------------------


def test_settings_that_name_single_blocks_run_all() -> None:
    named = replace(SETTINGS, activation_checkpointing=("blocks.1*",))
    check_same(runs_whole=True, settings=named)


@pytest.mark.slow
def test_a_plan_of_layers_that_names_single_blocks_runs_all() -> None:
    parallel = Parallel(tensor={"blocks.[0-5].up": "column", "blocks.[0-5].down": "row"})
    recipe = replace(RECIPE, parallel=parallel)
    check_same(recipe, runs_whole=True, backend="mesh", num_ranks=2, tensor=2)


@pytest.mark.parametrize(
    ("text", "alike"),
    [
        *((text, False) for text in ("blocks.7", "blocks.1*.up", "*.?.up", "b*.[13].up.weight")),
        *((text, False) for text in ("blocks.13", "*3")),  # what follows the blocks
        *((text, True) for text in ("*", "*.up", "*.fc1", "blocks.*.0", "blocks.0", "Block2", "")),
    ],
)
def test_patterns_of_single_blocks_are_seen(text: str, alike: bool) -> None:
    blocks = find_equal_blocks(recipe_of(Listed))
    assert blocks is not None
    assert blocks.are_named_alike((), {"tensor": [text]}) is alike
    assert blocks.are_named_alike(Parallel(experts=[text])) is alike


def test_patterns_in_options_with_slots_are_seen() -> None:
    @dataclass(frozen=True, slots=True)
    class Options:
        kept: str = "blocks.7"

    blocks = find_equal_blocks(RECIPE)
    assert blocks is not None
    assert not blocks.are_named_alike(Options())


@pytest.mark.slow
def test_a_driver_that_does_not_promise_it_runs_the_whole_model() -> None:
    check_same(runs_whole=True, backend="deepspeed", num_ranks=2, stage=1)


def test_a_step_that_cannot_be_run_says_so_of_the_whole_model() -> None:
    def reads(module: nn.Module, batch: tuple[Tensor]) -> Tensor:
        loss = summed(module, batch)
        if torch.is_grad_enabled() and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient.numpy() and None)
        return loss

    recipe = recipe_of(Model, loss=reads)
    blocks = find_equal_blocks(recipe)
    assert blocks is not None
    with pytest.raises(NotSymbolic, match="numpy"):
        found(blocks, recipe)


# --- sequences ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shorter", "longer", "part"),
    [
        ("<ababab>", "<abababab>", "ab"),
        ("<FMML>", "<FMMML>", "M"),
        ("<>", "<>", ""),
        ("<aaa>bbb", "<aaa>bbb", ""),
        ("<FML>", "<FMML>", "M"),
        ("<FL>", "<FML>", None),  # a block like no other
        ("<ABA>", "<ABAB>", None),  # two kinds in turn
        ("<aaabbb>", "<aaaabbbb>", None),  # two repeated parts
        ("<aaaa>", "<aaa>", None),
        ("<aaa>", "[aaaa]", None),
        ("", "a", None),
    ],
)
def test_the_added_part_repeats_its_neighbour(shorter: str, longer: str, part: str | None) -> None:
    found = added_part(shorter, longer)
    if part is None:
        assert found is None
    else:
        assert found is not None
        begin, end = found
        assert sorted(longer[begin:end]) == sorted(part)
        assert longer[:begin] + longer[end:] == shorter


def backward(depth: int) -> Trace:
    """Return a backward whose blocks still hold, until their last operation, what the block before
    them sends. The last block has other operations.
    """
    names, live = list[str](), list[list[int]]()
    for index in range(depth):
        kept, sent = 10 * (depth - index), 15 if index else 0
        names += "abcde" if index < depth - 1 else "aBCDE"
        live += [[kept, sent]] * 4 + [[kept, 15]]
    kinds = ["activations", "communication"]
    return Trace([("backward", name) for name in names], [None] * len(names), kinds, tensor(live))


def test_a_first_block_may_hold_less_than_those_after_it() -> None:
    found = with_more_blocks(backward(3), backward(4), 7)
    assert found is not None
    assert found.bytes == backward(10).summary().bytes == {"activations": 100, "communication": 15}
