"""The parts of a rank's memory, and the sentence that names the largest ones."""

from __future__ import annotations

from collections.abc import Mapping

from .settings import Settings

__all__ = ["ON_HOST", "PARTS", "describe", "listed", "remedies", "size_of"]

PARTS = {
    "weights": "weights that are trained",
    "frozen": "frozen weights",
    "buffers": "buffers of the model",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "communication": "for a while: gathered or cast weights, buffers of communication",
    "loader": "batches ready in the loader",
    "workers": "data workers",
    "host": "offloaded to the host",
}
"""Title of each part."""
ON_HOST = frozenset({"loader", "workers", "host"})
"""Parts in host memory, also if the rank trains on a device."""

_LARGE = 0.05
"""Share of the whole from which on a part is named."""
_MOST_NAMED = 4


def remedies(settings: Settings, micro_batch: int, saves_memory: str) -> dict[str, str]:
    """Return the settings that shrink each part, where some do. `saves_memory`: the driver's
    advice."""
    kept = []
    if micro_batch > 1:
        kept.append(f"micro_batch={-(-micro_batch // 2)}")
    if not settings.activation_checkpointing:
        kept.append("activation_checkpointing")
    if settings.precision == "fp32":
        kept.append("precision=bf16")
    shards = saves_memory or "several ranks, with a backend that shards"
    found = {
        "weights": shards,
        "frozen": shards,
        "gradients": shards,
        "optimizer": f"{shards}; or an optimizer with less state (optimizer.name)",
        "activations": ", ".join(kept) or "a smaller model",
        "communication": "smaller units and buckets, in the options of the backend",
        "loader": "fewer data.workers, or a smaller micro_batch",
        "workers": "fewer data.workers",
    }
    if settings.average.decay is not None:
        found["optimizer"] += "; average.decay=none"
    return found


def describe(
    parts: Mapping[str, int],
    estimated: frozenset[str],
    modules: Mapping[str, int],
    settings: Mapping[str, str],
) -> str:
    """Return a sentence on the largest parts, and the settings that shrink them; empty if nothing
    was counted. `modules`: activations by module."""
    total = sum(parts.values())
    largest = sorted(parts, key=lambda part: -parts[part])[:_MOST_NAMED]
    named = []
    for part in largest:
        if parts[part] < _LARGE * total or not parts[part]:
            continue
        text = f"{PARTS[part]} {size_of(parts[part])}"
        if part in estimated:
            text += " (estimated)"
        if part == "activations" and modules:
            most = max(modules, key=lambda name: modules[name])
            text += f" (of {most} {size_of(modules[most])})"
        named.append(f"{text}: {settings[part]}" if part in settings else text)
    if not named:
        return ""
    return f"The largest parts of memory, and what shrinks them: {' | '.join(named)}"


def listed(parts: Mapping[str, int], estimated: frozenset[str]) -> str:
    """List all parts with their sizes, the largest first."""
    largest_first = sorted(parts, key=lambda part: -parts[part])
    return ", ".join(
        f"{PARTS[part]} {size_of(parts[part])}{' (estimated)' if part in estimated else ''}"
        for part in largest_first
        if parts[part]
    )


def size_of(num_bytes: float) -> str:
    """Return the size with its unit, such as `1.23 MB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 999.5:  # what is more is rounded to 1000
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
