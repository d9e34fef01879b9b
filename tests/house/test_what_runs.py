"""The README's test command leaves slow tests out, but no law of any driver. It looks for a planted
fault in each law. Each test that it leaves out is in one of the shards of .ci/run.
"""

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
from drivetrain.registry import known_backends

def checked(case):
    return [f"{case.law}-{case.function.__name__}", str(case)]

expected = {backend: [*map(checked, cases(backend))] for backend in known_backends()}
reported = {"expected": expected, "laws": [], "faults": []}

class Collected:
    def pytest_collection_finish(self, session):
        from faults import FAULTS

        reported["planted"] = {name: fault.caught_by for name, fault in FAULTS.items()}
        for item in session.items:
            chosen = item.callspec.params if hasattr(item, "callspec") else {}
            if isinstance(case := chosen.get("case"), Case):
                subject = case.subject
                reported["laws"].append([subject.backend, str(subject.options), *checked(case)])
            elif item.originalname == "test_fault_is_caught":
                reported["faults"].append(chosen["fault"])

folders = ["tests/backends", "tests/faults", "tests/simulated"]
code = pytest.main(["--collect-only", "-n0", *folders], [Collected()])
print(json.dumps(reported))
sys.exit(code)
"""


@pytest.fixture(scope="module")
def reported() -> dict[str, Any]:
    """Return the tests that the options in pyproject.toml select. The README's command has no other
    options.
    """
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_each_law_is_proved_of_each_driver_with_one_set_of_options(
    reported: dict[str, Any],
) -> None:
    """Require each check of a law. `cpu` and `ddp` run it with all of its arguments."""
    proved: dict[str, dict[str, set[str]]] = {}
    for backend, options, check, case in reported["laws"]:
        proved.setdefault(backend, {}).setdefault(options, set()).update((check, case))
    assert len(reported["expected"]) == 9
    proved["accelerator"] = proved["simulated"]  # the same driver on a simulated device
    for backend, laws in reported["expected"].items():
        if backend == "mesh":  # the others are done by the code of `fsdp`, and slow here
            laws = [law for law in laws if law[0].startswith(("1_", "2_", "6_resume"))]
            # its own tests show it between all layouts
            moved = "6_resume-checkpoints_move_between_drivers_and_worlds"
            laws = [law for law in laws if law[0] != moved]
        whole = backend in ("cpu", "ddp")
        wanted = {case if whole else check for check, case in laws}
        left_out = [wanted - those for those in proved[backend].values()]
        assert set() in left_out, (backend, min(left_out, key=len))


def test_a_planted_fault_is_looked_for_in_each_law(reported: dict[str, Any]) -> None:
    laws = {name: check.partition("-")[0] for name, check in reported["planted"].items()}
    assert {laws[name] for name in reported["faults"]} == {*laws.values()} != set()


def test_each_test_is_in_one_shard(pytestconfig: pytest.Config) -> None:
    choose = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    names = [f"tests/test_{number}.py::test" for number in range(100)]
    shards = []
    for part in range(4):
        items = [SimpleNamespace(nodeid=name) for name in names]
        config = SimpleNamespace(
            getoption=lambda _, part=part: (part, 4),
            hook=SimpleNamespace(pytest_deselected=lambda items: None),
            stash={choose.CHANGED: []},
        )
        choose.pytest_collection_modifyitems(config, items)
        shards.append([item.nodeid for item in items])
    assert sorted(sum(shards, [])) == sorted(names)
    assert min(map(len, shards)) > 15
