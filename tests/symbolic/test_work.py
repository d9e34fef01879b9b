"""The work of a step: FLOPs, bytes that are moved, and messages with their groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from drivetrain import Parallel, Recipe, Settings
from drivetrain.registry import find_driver
from drivetrain.symbolic.first_batch import first_batch
from drivetrain.symbolic.step import FORWARD, UPDATE, SymbolicStep, symbolic_step

WIDTH, HIDDEN, SAMPLES = 32, 128, 8
SETTINGS = Settings(steps=4, global_batch=SAMPLES)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(x)))
        return result


def blocks() -> nn.Module:
    return nn.Sequential(Block(), Block(), Block())


def summed(module: nn.Module, batch: tuple[Tensor]) -> Tensor:
    result: Tensor = module(batch[0]).square().mean(1).sum()
    return result


RECIPE = Recipe(blocks, summed, TensorDataset(torch.zeros(64, WIDTH)))
WEIGHTS = sum(each.nbytes for each in blocks().parameters())


def found(
    backend: str = "cpu",
    num_ranks: int = 1,
    settings: Settings = SETTINGS,
    recipe: Recipe = RECIPE,
    **options: Any,
) -> SymbolicStep:
    driver = find_driver(backend)
    plan = settings.plan(driver.options_type(**options))
    return symbolic_step(
        recipe, driver, plan, settings, num_ranks, partial(first_batch, recipe, settings)
    )


def sent(step: SymbolicStep, phase: str, is_last: bool = True) -> Counter[str]:
    """Return the bytes of messages of more than a few numbers, by name."""
    counted = Counter[str]()
    for each in step.messages:
        if each.phase == phase and each.is_last == is_last and each.num_bytes > 64:
            counted[each.name] += each.num_bytes
    return counted


# --- operations -----------------------------------------------------------------------------------


def test_flops_are_those_of_matrix_products() -> None:
    step = found()
    product = 2 * SAMPLES * WIDTH * HIDDEN
    flops = Counter[str]()
    for each in step.operations:
        flops[each.phase] += each.flops
    # six layers; in the backward each has two products, the first one only that of its weights
    assert +flops == {FORWARD: 6 * product, "backward": 11 * product}
    assert {each.dtype for each in step.operations if each.flops} == {torch.float32}


def test_recomputation_is_part_of_the_backward() -> None:
    step = found(settings=replace(SETTINGS, activation_checkpointing=("Block",)))
    plain = found()
    forward = sum(each.flops for each in plain.operations if each.phase == FORWARD)
    assert sum(each.flops for each in step.operations if each.phase == FORWARD) == forward
    # the last product of a block is not needed for its backward
    added = sum(each.flops for each in step.operations) - sum(
        each.flops for each in plain.operations
    )
    assert forward / 2 <= added <= forward


def test_products_in_bfloat16_are_counted_as_such() -> None:
    step = found(settings=replace(SETTINGS, precision="bf16"))
    assert {each.dtype for each in step.operations if each.flops} == {torch.bfloat16}


def test_attention_has_flops() -> None:
    positions, heads = 16, 4

    def attention(module: nn.Module, batch: tuple[Tensor]) -> Tensor:
        x = module(batch[0]).unflatten(-1, (heads, -1)).transpose(1, 2)
        result: Tensor = nn.functional.scaled_dot_product_attention(x, x, x).square().sum()
        return result

    data = TensorDataset(torch.zeros(64, positions, WIDTH))
    step = found(recipe=Recipe(lambda: nn.Linear(WIDTH, WIDTH), attention, data))
    linear = 2 * SAMPLES * positions * WIDTH * WIDTH
    scores = 2 * SAMPLES * positions * positions * WIDTH
    flops = sum(each.flops for each in step.operations if each.phase == FORWARD)
    assert flops == linear + 2 * scores


def test_bytes_are_those_that_are_read_and_written() -> None:
    update = [each for each in found().operations if each.phase == UPDATE]
    # AdamW reads weight, gradient and two moments, and writes them; the norm reads the gradient.
    # What asks for a tensor's device or dtype moves nothing
    moved = sum(each.num_bytes for each in update)
    assert (7 + 1) * WEIGHTS <= moved <= (8 + 1) * WEIGHTS + 1000


def change_of(amount: str, change: Callable[[Tensor, Tensor], object]) -> int:
    """Return by how much a loss that also changes two tensors of 4,000 bytes has more."""

    def amount_with(change: Callable[[Tensor, Tensor], object]) -> int:
        def loss(module: nn.Module, batch: tuple[Tensor]) -> Tensor:
            result: Tensor = module(batch[0]).sum()
            with torch.no_grad():
                change(torch.empty(1000), torch.empty(1000))
            return result

        step = found(recipe=replace(RECIPE, loss=loss))
        return sum(getattr(each, amount) for each in step.operations)

    return amount_with(change) - amount_with(lambda first, second: None)


def test_a_tensor_that_is_replaced_is_not_read() -> None:
    moved = partial(change_of, "num_bytes")
    assert moved(Tensor.add) == moved(Tensor.add_) == 3 * 4000
    assert moved(Tensor.copy_) == 2 * 4000
    assert moved(lambda first, second: first.zero_()) == 4000
    assert moved(lambda first, second: first.view(10, 100)) == 0


def test_new_memory_is_that_of_results_that_share_none_with_arguments() -> None:
    new = partial(change_of, "new_bytes")
    assert new(Tensor.add) == 4000
    assert new(Tensor.add_) == new(lambda first, second: first.view(10, 100)) == 0
    assert new(lambda first, second: torch.add(first, second, out=first)) == 0
    assert new(lambda first, second: torch.empty(500)) == 2000


def test_each_microbatch_is_counted() -> None:
    step = found(settings=replace(SETTINGS, micro_batch=2))
    assert (step.num_microbatches, step.samples_of_reader) == (4, SAMPLES)
    first, last = (
        [each for each in step.operations if each.is_last == is_last and each.phase != UPDATE]
        for is_last in (False, True)
    )
    assert sum(each.flops for each in first) == sum(each.flops for each in last) > 0


# --- messages -------------------------------------------------------------------------------------


def test_one_rank_sends_nothing() -> None:
    assert not found().messages


def test_ddp_sends_its_gradients_in_the_last_microbatch() -> None:
    step = found("ddp", 4, replace(SETTINGS, micro_batch=1))
    assert sent(step, "backward") == {"allreduce": WEIGHTS}
    assert not sent(step, "backward", is_last=False)
    (buckets,) = {each.ranks for each in step.messages if each.phase == "backward"}
    assert buckets == (0, 1, 2, 3)
    assert all(each.overlaps for each in step.messages if each.phase == "backward")


def test_fsdp_gathers_weights_and_scatters_gradients() -> None:
    step = found("fsdp", 4)
    assert sent(step, FORWARD) == {"allgather_base": WEIGHTS}
    assert sent(step, "backward")["reduce_scatter_base"] == WEIGHTS
    kept = found("fsdp", 4, reshard_after_forward=False)
    assert not sent(kept, "backward")["allgather_base"]


def test_groups_of_fsdp_have_their_ranks() -> None:
    step = found("fsdp", 4, shard_size=2)
    ranks = {each.name: each.ranks for each in step.messages if each.num_bytes > 64}
    assert ranks["allgather_base"] == (0, 1)
    assert ranks["allreduce"] == (0, 2)


def test_partitioned_layers_wait_for_each_other() -> None:
    parallel = Parallel(tensor={"*.up": "column", "*.down": "row"})
    step = found("mesh", 4, recipe=replace(RECIPE, parallel=parallel), tensor=2)
    sums = [each for each in step.messages if each.name == "all_reduce" and each.phase == FORWARD]
    assert [each.num_bytes for each in sums] == 3 * [4 * SAMPLES // 2 * WIDTH]
    assert {(each.ranks, each.overlaps) for each in sums} == {((0, 1), False)}
