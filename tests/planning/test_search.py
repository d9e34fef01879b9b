"""The search for ways to place a run: the largest microbatch that fits, and why others do not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest

from drivetrain import Parallel
from drivetrain.planning.devices import find_device
from drivetrain.planning.search import LeftOut, Planned, Search, Way
from drivetrain.registry import find_driver
from drivetrain.symbolic.step import SymbolicStep

from .searching import RECIPE, SETTINGS, searching, ways


@cache
def needed(micro_batch: int) -> int:
    """Return the memory of a rank of ddp in float32."""
    search = searching(80e9, ("micro_batch", "precision", "activation_checkpointing"))
    (way,) = ways(search, "ddp", replace(SETTINGS, micro_batch=micro_batch))
    (found,) = search.look(way)
    assert isinstance(found, Planned)
    return found.total_bytes


def test_all_samples_of_a_rank_are_one_microbatch_where_they_fit() -> None:
    search = searching(80e9, ("precision",))
    (way,) = ways(search, "ddp")
    (found,) = search.look(way)
    assert isinstance(found, Planned)
    assert (found.num_microbatches, found.choice.settings["micro_batch"]) == (1, None)
    assert found.choice.settings["activation_checkpointing"] == ()  # it is not needed


def test_the_largest_microbatch_that_fits_is_found() -> None:
    limit = (needed(4) + needed(8)) / 2
    search = searching(limit / 0.9, ("precision", "activation_checkpointing"))
    (way,) = ways(search, "ddp")
    (found,) = search.look(way)
    assert isinstance(found, Planned)
    assert (found.choice.settings["micro_batch"], found.num_microbatches) == (4, 8)
    assert found.total_bytes == needed(4) <= search.usable_bytes < needed(8)


def test_recomputation_lets_larger_ones_fit() -> None:
    limit = (needed(4) + needed(8)) / 2
    search = searching(limit / 0.9, ("precision",))
    (way,) = ways(search, "ddp")
    kept, recomputed = search.look(way)
    assert isinstance(kept, Planned) and isinstance(recomputed, Planned)
    assert recomputed.choice.settings["activation_checkpointing"] == ("Block",)
    assert recomputed.num_microbatches < kept.num_microbatches
    assert recomputed.estimate.flops > kept.estimate.flops


def sizes_run(memory: float) -> tuple[list[int | None], list[Planned | LeftOut]]:
    """Return the microbatches of the steps that are run to place ddp, and what becomes of it."""
    search, sizes = searching(memory, ("precision",)), []
    run = search._run

    def counted(way: Way) -> SymbolicStep:
        sizes.append(way.settings.micro_batch)
        return run(way)

    with patch.object(search, "_run", counted):
        return sizes, search.look(ways(search, "ddp")[0])


def test_recomputation_is_not_tried_where_weights_alone_do_not_fit() -> None:
    sizes, found = sizes_run(1e6)
    assert sizes == [None, 1]
    assert [each.needed_bytes for each in found if isinstance(each, LeftOut)] == [needed(1)]


def test_the_smallest_is_tried_first_where_it_did_not_fit_before() -> None:
    sizes, (kept, recomputed) = sizes_run(needed(1) / 0.9 - 1)
    assert isinstance(kept, LeftOut) and kept.needed_bytes == needed(1)
    assert sizes[:3] == [None, 1, 1]
    assert (sizes[3:] == []) is isinstance(recomputed, LeftOut)


def test_what_does_not_fit_says_what_it_needs() -> None:
    search = searching(1e6, ("precision", "activation_checkpointing"))
    (way,) = ways(search, "ddp")
    (found,) = search.look(way)
    assert isinstance(found, LeftOut)
    assert found.needed_bytes == needed(1)
    assert "most of it" in found.reason


def test_settings_that_are_given_are_not_varied() -> None:
    given = ("precision", "micro_batch", "activation_checkpointing")
    search = searching(80e9, given)
    (way,) = ways(search, "ddp", replace(SETTINGS, precision="bf16", micro_batch=2))
    (found,) = search.look(way)
    assert found.choice.settings == {
        "precision": "bf16",
        "micro_batch": 2,
        "activation_checkpointing": (),
    }
    assert len(ways(searching(80e9), "ddp")) == 2  # both precisions


def test_options_that_are_given_are_kept() -> None:
    search = searching(80e9, ("precision",))
    assert {way.options["stage"] for way in ways(search, "deepspeed")} == {1, 2, 3}
    assert [way.options["stage"] for way in ways(search, "deepspeed", stage=3)] == [3]
    (unlisted,) = ways(search, "fsdp", shard_size=2)  # for all ranks, None is listed
    assert unlisted.options == {"shard_size": 2}
    offloaded = ways(search, "fsdp", cpu_offload=True)
    assert all(way.options["cpu_offload"] for way in offloaded)
    assert len(offloaded) == len(ways(search, "fsdp")) > 1


@pytest.mark.parametrize(
    ("parallel", "names"),
    [
        (None, {"pipeline"}),
        (Parallel(tensor={"*.up": "column", "*.down": "row"}), {"pipeline", "tensor"}),
        (Parallel(sequence={"x": 1}), {"pipeline", "context"}),
        (Parallel(experts=["experts"]), {"pipeline", "expert"}),
    ],
)
def test_a_mesh_has_the_dimensions_that_a_recipe_allows(
    parallel: Parallel | None, names: set[str]
) -> None:
    search = Search(replace(RECIPE, parallel=parallel), 8, find_device("h100"))
    listed = ways(search, "mesh")
    sizes = [
        {name: way.options.get(name) or 1 for name in ("replicate", "shard", "context", "tensor")}
        for way in listed
        if way.options["pipeline"] == 1
    ]
    assert all(
        each["replicate"] * each["shard"] * each["context"] * each["tensor"] == 8 for each in sizes
    )
    found = {
        name
        for way in listed
        for name in ("pipeline", "tensor", "context", "expert")
        if way.options.get(name, 1) > 1
    }
    assert found == names


def test_a_way_that_is_refused_has_the_reason() -> None:
    search = searching(80e9, ("precision",))
    (pipeline,) = ways(search, "mesh")
    (found,) = search.look(pipeline)
    assert isinstance(found, LeftOut) and not found.needed_bytes
    assert "pipeline" in found.reason


def test_a_driver_that_lists_nothing_is_named() -> None:
    found = searching(80e9).ways(find_driver("cpu"), SETTINGS, {})
    assert isinstance(found, LeftOut)
    assert found.reason == "does not list ways to place a model on accelerators"
