"""Places of runs and checkpoints: a local path, or the URL of an object store."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import SettingError

__all__ = ["Place", "Url", "place"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(?=[^/])")
_LOST_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:)/(?!/)")


@dataclass(frozen=True)
class Url:
    """The part of `Path` that checkpoints need, for a place that is not in the file system."""

    text: str

    @property
    def scheme(self) -> str:
        """Such as `s3`."""
        return self.text.partition("://")[0]

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """The part before the last slash."""
        return Url(self.text.rpartition("/")[0])

    def with_name(self, name: str) -> Url:
        """A sibling."""
        return self.parent / name

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self.text}/{name}")

    def __str__(self) -> str:
        return self.text


Place = Path | Url


def place(value: str | os.PathLike[str] | Url) -> Place:
    """The place that a user names: a URL if it begins like `s3://`, otherwise a path."""
    if isinstance(value, Url):
        return value
    text = os.fspath(value)
    if not text or "\0" in text:
        raise SettingError(f"{text!r} is no path; give the path of a folder, or a URL")
    if _SCHEME.match(text):
        if wild := sorted(set(text) & set("*?[]")):
            raise SettingError(f"{text!r}: {' '.join(wild)} may not be in the URL of a run")
        return Url(text.rstrip("/"))
    lost = _LOST_SLASH.match(text)
    if isinstance(value, Path) and lost and not Path(lost[1]).exists():
        raise SettingError(
            f"{text!r} looks like a URL that became a path, which loses a slash: give it as a str"
        )
    return Path(value)
