"""Searches with the real Trainer on two processes."""

from __future__ import annotations

from typing import Any

import pytest
import search_ranks
from subjects import subject

pytestmark = pytest.mark.slow
RATES = (0.01, 0.0001, 0.02)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of two ranks (see search_ranks.py)."""
    folder = tmp_path_factory.mktemp("search")
    pair = subject("deepspeed", 2, timeout_seconds=400)
    return pair.run(search_ranks.everything, out=str(folder))


@pytest.mark.row("H10", "H11", "H8")
def test_what_rank_0_draws_is_trained_with_on_both(ranks: list[dict[str, Any]]) -> None:
    leading, following = (rank["ddp"] for rank in ranks)
    trials = leading["trials"]
    assert trials == following["trials"] and following["best"] is None
    assert sorted(trial["rate"] for trial in trials) == sorted(RATES)
    for number, trial in enumerate(trials):
        assert trial["params"] == {"learning_rate": trial["rate"]}
        assert (trial["name"], trial["searching"]) == (f"trial {number}", True)
    assert len({tuple(trial["losses"][:2]) for trial in trials}) == 3
    evaluations = [trial["evaluated"] for trial in trials]
    assert evaluations[0] == 3 and 2 in evaluations  # one was pruned, on both
    number, _, parameters = leading["best"]
    assert parameters == trials[int(number)]["params"]


@pytest.mark.row("H12", "H14")
def test_deepspeed_is_configured_again_for_each_trial(ranks: list[dict[str, Any]]) -> None:
    trials = ranks[0]["deepspeed"]["trials"]
    assert trials == ranks[1]["deepspeed"]["trials"]
    found = {trial["batch"]: trial["configured"] for trial in trials}
    assert found == {2: 4, 4: 8}  # samples of an update, of both ranks
    assert all(len(trial["losses"]) == 3 for trial in trials)


@pytest.mark.row(
    "P9", status="differs", note="DeepSpeed's own where its JSON has it, else autocast"
)
def test_deepspeed_keeps_weights_in_half_precision(ranks: list[dict[str, Any]]) -> None:
    found = {name: ranks[0][name]["trials"][0]["dtype"] for name in ("ddp", "deepspeed")}
    assert found == {"ddp": "torch.float32", "deepspeed": "torch.bfloat16"}
