"""A JobSet for Kubernetes (https://jobset.sigs.k8s.io), a pod for each node.

A pod that was interrupted (exit code 75, or moved by the cluster) is made anew and does not count
as a failure; one that failed begins the whole set anew; a command that cannot be carried out (2)
ends it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ...kernel.errors import EXIT_PREEMPTED, SettingError, UsageError
from .job import Job

__all__ = ["manifest", "to_yaml"]

_GROUP = "node"
_CONTAINER = "drivetrain"
_SHARED_MEMORY = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
_ENDS = "a-command-that-cannot-be-carried-out"


def manifest(
    job: Job, image: str, *, gpus: int, claim: str | None, grace: float, max_restarts: int
) -> dict[str, Any]:
    """The JobSet. `claim` is `NAME:/path`, a volume claim and where it is mounted. Raises
    `SettingError`."""
    name = _name(job.name)
    claimed = _claim(job, claim)
    first = f"{name}-{_GROUP}-0-0.{name}"
    limits = {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {}
    container = {
        "name": _CONTAINER,
        "image": image,
        "command": ["drivetrain", *job.command(first, name)],
        "resources": limits,
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *({"name": "claim", "mountPath": path} for _, path in claimed),
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(grace),
        "containers": [container],
        "volumes": [
            _SHARED_MEMORY,
            *(
                {"name": "claim", "persistentVolumeClaim": {"claimName": claimed_name}}
                for claimed_name, _ in claimed
            ),
        ],
    }
    jobs = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": _pod_rules()},
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": max_restarts,
                "rules": [
                    {
                        "name": _ENDS,
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [{"name": _GROUP, "replicas": 1, "template": {"spec": jobs}}],
        },
    }


def _pod_rules() -> list[dict[str, Any]]:
    def codes(code: int) -> dict[str, Any]:
        return {"containerName": _CONTAINER, "operator": "In", "values": [code]}

    return [
        {"action": "Ignore", "onExitCodes": codes(EXIT_PREEMPTED)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": codes(UsageError.exit_code)},
    ]


def _name(name: str) -> str:
    """As Kubernetes takes names, short enough for the names that it makes of it."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-")
    if not found or not found[0].isalpha():
        raise SettingError(
            f"a job of Kubernetes cannot be called {name!r}; give --name, as in run-a"
        )
    return found


def _claim(job: Job, claim: str | None) -> list[tuple[str, str]]:
    """The claim and its path. Raises `SettingError` where the run folder would go with its pod."""
    if claim is None:
        if "://" in job.out:
            return []
        raise SettingError(
            f"the run folder {job.out} would be lost with its pod; give --claim NAME:/path, a "
            "volume claim that holds it, or --out a URL, such as s3://bucket/run"
        )
    name, _, path = claim.partition(":")
    if not name or not path.startswith("/"):
        raise SettingError(f"--claim is {claim!r}; write NAME:/path, such as runs:/runs")
    if "://" not in job.out and not job.out.startswith(path.rstrip("/") + "/"):
        raise SettingError(f"--out is {job.out}, which does not lie in {path} of --claim {claim}")
    return [(name, path)]


def to_yaml(value: Any) -> str:
    """Mappings and lists in YAML's own way, all else as JSON, which is YAML."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _entry(f"{key}:", inner)
    else:
        for inner in value:
            yield from _entry("-", inner)


def _entry(head: str, inner: Any) -> Iterator[str]:
    if not isinstance(inner, (dict, list)) or not inner or _is_short(inner):
        yield f"{head} {json.dumps(inner)}"
        return
    lines = [f"  {line}" for line in _lines(inner)]
    if head == "-":
        yield "- " + lines[0].lstrip()
        yield from lines[1:]
    else:
        yield head
        yield from lines


def _is_short(value: Sequence[Any] | dict[str, Any]) -> bool:
    """One line is enough: a list of numbers, or a single word."""
    return isinstance(value, list) and len(value) == 1 and not isinstance(value[0], dict)
