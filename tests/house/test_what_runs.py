"""The README's test command leaves out what is slow, but no law of any driver and no planted fault;
what it leaves out is in one of the shards of .ci/run."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from house_rules import ROOT

COLLECT = """
import json, pytest, sys
from drivetrain.conformance import Case, cases
from drivetrain.kernel.registry import known_backends

expected = {backend: [str(case) for case in cases(backend)] for backend in known_backends()}
told = {"expected": expected, "laws": [], "faults": []}

class Tell:
    def pytest_collection_finish(self, session):
        from faults import FAULTS

        told["planted"] = [*FAULTS]
        for item in session.items:
            chosen = item.callspec.params if hasattr(item, "callspec") else {}
            if isinstance(case := chosen.get("case"), Case):
                subject = case.subject
                told["laws"].append([subject.backend, str(subject.options), str(case)])
            elif item.originalname == "test_fault_is_caught":
                told["faults"].append(chosen["fault"])

code = pytest.main(["--collect-only", "-n0", "tests/backends", "tests/faults"], [Tell()])
print(json.dumps(told))
sys.exit(code)
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What the options in pyproject.toml choose, as the README's command has no others."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_each_law_is_proved_of_each_driver_with_one_set_of_options(told: dict[str, Any]) -> None:
    proved: dict[str, dict[str, set[str]]] = {}
    for backend, options, law in told["laws"]:
        proved.setdefault(backend, {}).setdefault(options, set()).add(law)
    assert len(told["expected"]) == 8
    for backend, laws in told["expected"].items():
        if backend == "mesh":  # the others are done by the code of `fsdp`, and slow here
            laws = [law for law in laws if law.startswith(("1_", "2_", "6_resume"))]
        left_out = [set(laws) - those for those in proved[backend].values()]
        assert set() in left_out, (backend, min(left_out, key=len))


def test_each_planted_fault_is_looked_for(told: dict[str, Any]) -> None:
    assert told["faults"] == told["planted"] != []


def test_each_test_is_in_one_shard(pytestconfig: pytest.Config) -> None:
    choose = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    names = [f"tests/test_{number}.py::test" for number in range(100)]
    shards = []
    for part in range(4):
        items = [SimpleNamespace(nodeid=name) for name in names]
        config = SimpleNamespace(
            getoption=lambda _, part=part: (part, 4),
            hook=SimpleNamespace(pytest_deselected=lambda items: None),
        )
        choose.pytest_collection_modifyitems(config, items)
        shards.append([item.nodeid for item in items])
    assert sorted(sum(shards, [])) == sorted(names)
    assert min(map(len, shards)) > 15
