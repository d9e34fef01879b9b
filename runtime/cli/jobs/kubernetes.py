"""A JobSet for Kubernetes (https://jobset.sigs.k8s.io), a pod for each node.

An interrupted pod (exit code 75, or moved by the cluster) is replaced, and does not count as a
failure. A failed pod restarts the whole set. A command that cannot be carried out (exit code 2)
ends the set.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ...kernel.errors import EXIT_PREEMPTED, FailedAfterTraining, SettingError, UsageError
from .job import Job

__all__ = ["manifest", "to_yaml"]

_GROUP = "node"
_CONTAINER = "drivetrain"
_SHARED_MEMORY = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
_ENDS = "a-command-that-cannot-be-carried-out"


def manifest(
    job: Job, image: str, *, gpus: int, claim: str | None, grace: float, max_restarts: int
) -> dict[str, Any]:
    """Return the JobSet. `claim` is `NAME:/path`, a volume claim and where it is mounted. Raises
    `SettingError`."""
    name = _name(job.name)
    claimed = _claim(job, claim)
    first = f"{name}-{_GROUP}-0-0.{name}"
    limits = {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {}
    container = {
        "name": _CONTAINER,
        "image": image,
        "command": ["drivetrain", *_literal([*job.command, *job.meeting(first, name)])],
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


def _literal(words: Sequence[str]) -> list[str]:
    """Escape the words so that the program receives them literally. The kubelet replaces `$(NAME)`
    by a variable, and `$$` by `$`. Raises `SettingError`.
    """
    for word in words:
        if not _is_unicode(word):
            raise SettingError(f"{word!r:.200} is not UTF-8, and a manifest can hold nothing else")
    return [word.replace("$", "$$") for word in words]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _pod_rules() -> list[dict[str, Any]]:
    def codes(*values: int) -> dict[str, Any]:
        return {"containerName": _CONTAINER, "operator": "In", "values": list(values)}

    return [
        {"action": "Ignore", "onExitCodes": codes(EXIT_PREEMPTED)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "FailJob",
            "onExitCodes": codes(UsageError.exit_code, FailedAfterTraining.exit_code),
        },
    ]


def _name(name: str) -> str:
    """Convert to a name that Kubernetes accepts, short enough for the names that it derives."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-")
    if not found or not found[0].isalpha():
        raise SettingError(
            f"a job of Kubernetes cannot be called {name!r}; give --name, as in run-a"
        )
    return found


def _claim(job: Job, claim: str | None) -> list[tuple[str, str]]:
    """Return the claim and its path. Raises `SettingError` where the run folder would be lost with
    its pod."""
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
    inside = posixpath.normpath(job.out).startswith(posixpath.normpath(path).rstrip("/") + "/")
    if "://" not in job.out and not inside:
        raise SettingError(f"--out is {job.out}, which does not lie in {path} of --claim {claim}")
    return [(name, path)]


def to_yaml(value: Any) -> str:
    """Write mappings and lists in YAML's block style, texts in double quotes, all in ASCII."""
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
        yield f"{head} {_flow(inner)}"
        return
    lines = [f"  {line}" for line in _lines(inner)]
    if head == "-":
        yield "- " + lines[0].lstrip()
        yield from lines[1:]
    else:
        yield head
        yield from lines


def _is_short(value: Sequence[Any] | dict[str, Any]) -> bool:
    """True if one line is enough: a list of one number or word."""
    return isinstance(value, list) and len(value) == 1 and not isinstance(value[0], dict)


def _flow(value: Any) -> str:
    """Return the value on one line."""
    if isinstance(value, str):
        return f'"{"".join(map(_character, value))}"'
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    return json.dumps(value)


def _character(character: str) -> str:
    """Escape a character for double quotes. YAML, unlike JSON, has an escape above 0xFFFF."""
    code = ord(character)
    if character in '"\\':
        return f"\\{character}"
    if 0x20 <= code < 0x7F:
        return character
    if code <= 0xFFFF:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"
