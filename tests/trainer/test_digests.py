"""Digests that logs record: they name the first step and quantity at which two runs part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import EvaluateSettings, OptimizerSettings, Recipe, Settings
from drivetrain.data.sample_digest import differing_parts, part_digests, part_text
from drivetrain.kernel.events import StepEnded
from drivetrain.kernel.plan import World
from drivetrain.run.parting import Difference, Tolerance, first_difference, tolerance_between
from drivetrain.run.recorded_steps import RecordedStep, RecordedSteps
from drivetrain.run.records import record_of
from drivetrain.trainer.fit import fit
from drivetrain.trainer.tensor_figures import PartFigures, TensorFigures, joined

from .problems import Pairs, recipe

SETTINGS = Settings(
    steps=6,
    global_batch=8,
    micro_batch=3,
    log_every=2,
    evaluate=EvaluateSettings(at_end=False, sanity_check=False),
)


def records_of(recipe: Recipe, settings: Settings = SETTINGS, **options: Any) -> list[Any]:
    records = []

    def observe(event: Any) -> None:
        if not isinstance(event, StepEnded):
            records.append(record_of(event))

    fit(recipe, settings, backend="cpu", observers=[observe], **options)
    return records


def recorded(recipe: Recipe, settings: Settings = SETTINGS, **options: Any) -> RecordedSteps:
    found = RecordedSteps()
    for record in records_of(recipe, settings, **options):
        found.add(record)
    return found


def parted(first: RecordedSteps, second: RecordedSteps) -> list[Difference]:
    step = min(first.steps)
    tolerance = tolerance_between(first.steps[step], second.steps[min(second.steps)], ("", ""))
    return first_difference(first.steps, second.steps, tolerance, 0)


def test_digests_of_samples_do_not_depend_on_microbatches() -> None:
    batch = {"x": torch.randn(70, 5), "y": torch.arange(70), "flag": torch.ones(70, 3).bool()}
    whole = part_digests(batch, 70, 0, 70)
    split = [0] * len(whole)
    for start in range(0, 70, 20):
        part = {name: tensor[start : start + 20] for name, tensor in batch.items()}
        sums = part_digests(part, min(20, 70 - start), start, 70)
        split = [a + b for a, b in zip(split, sums, strict=True)]
    assert part_text(split) == part_text(whole)
    for name in batch:
        changed = {key: tensor.clone() for key, tensor in batch.items()}
        changed[name][69].copy_(~changed[name][69] if name == "flag" else changed[name][69] + 1)
        assert differing_parts(part_text(part_digests(changed, 70, 0, 70)), part_text(whole)) == [
            63
        ]


def test_each_value_of_a_batch_counts_that_is_not_one_row_a_sample() -> None:
    tokens = torch.arange(100)
    changed = torch.where(tokens == 99, 0, tokens)
    first, second = (part_digests({"tokens": each}, 8, 0, 8) for each in (tokens, changed))
    assert differing_parts(part_text(first), part_text(second)) == [0]


def test_a_resumed_run_records_the_same(tmp_path: Path) -> None:
    saving = dataclasses.replace(
        SETTINGS, checkpoint=dataclasses.replace(SETTINGS.checkpoint, every=3, keep_last=9)
    )
    first = recorded(recipe(dropout=0.3, noise=0.1), saving, out=tmp_path)
    again = recorded(
        recipe(dropout=0.3, noise=0.1), resume=tmp_path / "checkpoints" / "checkpoint-000003"
    )
    assert sorted(first.steps) == [2, 4, 6]
    assert sorted(again.steps) == [4, 6]
    assert not parted(first, again)


def with_optimizer(settings: Settings, **options: float) -> Settings:
    return dataclasses.replace(settings, optimizer=OptimizerSettings(**options))


def change_sample(settings: Settings) -> tuple[Recipe, Settings]:
    changed = recipe(48)
    assert isinstance(changed.train_data, Pairs)
    changed.train_data.inputs[:, 0] += 0.0
    where = torch.randperm(48, generator=torch.Generator().manual_seed(3))[:1]
    changed.train_data.inputs[where, 0] += 1.0
    return changed, settings


@pytest.mark.parametrize(
    ("change", "step", "quantity"),
    [
        (lambda s: (recipe(48), dataclasses.replace(s, seed=1)), 1, "loss"),
        (lambda s: (recipe(48), with_optimizer(s, lr=2e-3)), 2, "learning rate"),
        (lambda s: (recipe(48), with_optimizer(s, weight_decay=0.5)), 2, "loss"),
        (change_sample, None, "loss"),
    ],
    ids=["seed", "lr", "weight decay", "sample"],
)
def test_the_first_step_is_named(
    change: Callable[[Settings], tuple[Recipe, Settings]], step: int | None, quantity: str
) -> None:
    usual = recorded(recipe(48))
    assert not parted(usual, recorded(recipe(48)))
    found = parted(usual, recorded(*change(SETTINGS)))
    assert found[0].quantity == quantity
    assert step in (None, found[0].step)


def test_a_sample_that_differs_is_named() -> None:
    every = dataclasses.replace(SETTINGS, log_every=1)
    changed, _ = change_sample(every)
    found = parted(recorded(recipe(48), every), recorded(changed, every))
    assert found[0].quantity == "samples"
    assert "of 8 in the global batch" in found[0].where
    assert isinstance(changed.train_data, Pairs)


def test_a_weight_that_differs_is_named() -> None:
    def bit_flipped(weights: Any, number: int) -> None:
        if number == 4:
            weights["0.weight"].mul_(1 + 2**-22)

    usual = dataclasses.replace(recipe(48), after_update=lambda weights, number: None)
    changed = dataclasses.replace(usual, after_update=bit_flipped)
    found = parted(recorded(usual), recorded(changed))
    assert [(each.step, each.quantity) for each in found] == [(4, "weight 0.weight")]


def bits_of(*parts: torch.Tensor) -> int:
    return figures_of(*parts).bits


def figures_of(*parts: torch.Tensor) -> TensorFigures:
    """Return the figures of a tensor that consists of these parts, each of another rank."""
    ranks = []
    for part in parts:
        figures = PartFigures()
        figures.add("weight", part)
        ranks.append((figures.names, figures.stacked(World(0, 1, part.device, 0, 1)).tolist()))
    return joined(ranks)["weight"]


def flipped(tensor: torch.Tensor, mask: int) -> torch.Tensor:
    return (tensor.view(torch.int32) ^ mask).view(torch.float32)


@pytest.mark.parametrize("bit", [0, 3, 15, 16, 22, 26, 30, 31])
def test_flips_do_not_cancel_each_other(bit: int) -> None:
    """In a plain sum of words they do, where one half sets the bit and the other half clears it."""
    mask = (1 << bit) - (1 << 32 if bit == 31 else 0)
    for seed in range(50):
        some = torch.randn(512, generator=torch.Generator().manual_seed(seed))
        is_set = (some.view(torch.int32) & mask) != 0
        whole = torch.cat([some[is_set][:8], flipped(some[is_set], mask)[8:16], some[~is_set][16:]])
        changed = torch.cat([flipped(whole[:16], mask), whole[16:]])
        assert bits_of(changed) != bits_of(whole)


def test_flips_in_a_large_tensor_are_seen() -> None:
    """Words that lie far apart are added before they are hashed."""
    whole = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    changes = [
        (slice(at, at + 1), 1 << bit)
        for at in (0, 8190, 8191, 8192, 50_000, 98_291, 98_292, 100_002)
        for bit in range(31)
    ]
    changes += [(slice(0, size), 0xFFFF) for size in range(16, 40_000, 160)]
    for where, mask in changes:
        changed = whole.clone()
        changed[where] = flipped(whole[where], mask)
        assert bits_of(changed) != bits_of(whole)


def test_sums_and_norms_do_not_depend_on_how_ranks_share_a_tensor() -> None:
    whole = torch.randn(150_000)
    for parts in (whole.split(1001), whole.view(1000, -1).unbind(1)):
        shared = figures_of(*parts)
        assert shared.total == pytest.approx(float(whole.double().sum()), abs=0.01)
        assert shared.norm == pytest.approx(float(whole.double().norm()), rel=1e-5)
    assert bits_of(whole.bfloat16()[:7]) != bits_of(-whole.bfloat16()[:7])


def test_digests_are_compared_where_ranks_share_tensors_alike() -> None:
    first, second = (recorded(recipe(48)) for _ in range(2))
    assert not parted(first, second)

    def changed(step: RecordedStep, **digests: str) -> RecordedStep:
        others = {name: each._replace(bits=each.bits ^ 1) for name, each in step.weights.items()}
        return dataclasses.replace(step, weights=others, digests={**step.digests, **digests})

    second.steps = {number: changed(step) for number, step in second.steps.items()}
    assert {each.quantity.split()[0] for each in parted(first, second)} == {"weight"}
    other = {number: changed(step, layout="other") for number, step in second.steps.items()}
    assert not parted(first, dataclasses.replace(second, steps=other))


def with_bent_gradient(factor: float) -> Recipe:
    """Return the usual recipe, in whose fourth update the gradient of one weight is multiplied."""
    usual, updates = recipe(48), [0]

    def model() -> torch.nn.Module:
        built = usual.model()
        weight = built.get_submodule("0").get_parameter("weight")
        weight.register_hook(lambda gradient: gradient * (factor if updates == [3] else 1.0))
        return built

    def count(weights: Any, number: int) -> None:
        updates[:] = [number]

    return dataclasses.replace(usual, model=model, after_update=count)


def test_a_gradient_that_differs_in_a_bit_is_named() -> None:
    found = parted(recorded(with_bent_gradient(1.0)), recorded(with_bent_gradient(1 + 2**-22)))
    assert (found[0].step, found[0].quantity) == (4, "gradient 0.weight")
    assert {each.quantity for each in found} <= {
        *("gradient 0.weight", "gradient norm", "weight 0.weight")
    }


def test_a_wrong_gradient_is_named_where_rounding_differs() -> None:
    first, second = (recorded(with_bent_gradient(factor)).steps for factor in (1.0, 1.5))
    found = first_difference(first, second, Tolerance(False, 1e-5), 0)
    assert [(each.step, each.quantity) for each in found] == [
        (4, "gradient norm"),
        (4, "gradient 0.weight"),
    ]
    assert not first_difference(first, first, Tolerance(False, 1e-5), 0)


def test_records_without_gradients_are_compared() -> None:
    """Drop the fields that are absent in runs which were recorded before gradients were."""
    now, before = RecordedSteps(), RecordedSteps()
    for record in records_of(recipe(48)):
        now.add(record)
        before.add({k: v for k, v in record.items() if k not in ("gradients", "gradient_names")})
    assert now.steps.keys() == before.steps.keys() == {2, 4, 6}
    assert not parted(now, before)


def test_nothing_is_recorded_on_request() -> None:
    assert not recorded(recipe(48), dataclasses.replace(SETTINGS, digests="none")).steps
    samples = recorded(recipe(48), dataclasses.replace(SETTINGS, digests="samples"))
    assert all(step.weights == step.gradients == {} for step in samples.steps.values())
    assert len(samples.steps) == 3
