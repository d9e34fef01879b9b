"""Checkpoints at URLs: `s3://`, `gs://`, `memory://` and whatever else fsspec reaches."""

from __future__ import annotations

from .remote import FsspecStorage

__all__ = ["FsspecStorage"]
