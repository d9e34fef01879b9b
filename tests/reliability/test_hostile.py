"""Whatever a checkpoint contains, it is read or refused, in bounded time and memory, and no code in
it runs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from .hostile import NAME, SECONDS, Case, corpus, open_all, sound
from .runs import FORKSERVER

CASES = [
    pytest.param(case, id=case.name, marks=[] if number % 8 == 0 else pytest.mark.slow)
    for number, case in enumerate(corpus(Path("canary")))
]
"""Hostile checkpoints. Neighbours are alike, so the quick part takes every eighth."""


@pytest.fixture(scope="module")
def named(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Return the results of opening each selected checkpoint, in one process whose memory is
    bounded.
    """
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = [case.name for each in chosen if isinstance(case := each.get("case"), Case)]
    root = tmp_path_factory.mktemp("hostile")
    report, canary = root / "report", root / "canary"
    base = sound(root / "base")
    process = FORKSERVER.Process(target=open_all, args=(base, root / "w", canary, report, names))
    process.start()
    process.join(400)
    lines = report.read_text().splitlines() if report.exists() else []
    rows = [json.loads(line) for line in lines]
    next_one = [*names, "the end"][len(rows)]
    assert process.exitcode == 0, f"ended with {process.exitcode} at {next_one!r}"
    return {row["name"]: row for row in rows}


def test_there_are_hundreds_of_them() -> None:
    names = [case.name for case in corpus(Path("canary"))]
    assert len(names) == len(set(names)) > 600


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_an_error_of_ours(case: Case, named: dict[str, Any]) -> None:
    row = named[case.name]
    acts = {name: row[name] for name in ("list", "read", "verify", "resume", "resume blindly")}
    assert not [said for said in acts.values() if said.startswith("NOT OURS")]
    refused = row["list"] if case.trusted_by_name else row["resume"]
    assert row["verify"] or "of step" not in case.named
    assert refused, "it was resumed from"
    assert refused.startswith(("Checkpoint", "StorageFailed")), refused
    assert case.named in refused
    assert NAME in refused or "manifest" in refused or "checkpoint" in refused
    assert len(refused) < 3000, "an error is to be read"
    assert all(said.replace("\n", "").isprintable() for said in acts.values()), "it steers"
    assert row["seconds"] < SECONDS
    assert not row["canary"], "code in it was run"


def test_the_canary_sings(tmp_path: Path) -> None:
    """Load the pickles. Unless they run their code here, the test above proves nothing."""
    import pickle  # house: pickle

    from .hostile import pickles

    canary = tmp_path / "canary"
    for name, raw in pickles(canary).items():
        if not name.startswith("torch"):
            pickle.loads(raw)  # noqa: S301
            assert canary.exists(), name
            os.rmdir(canary)
