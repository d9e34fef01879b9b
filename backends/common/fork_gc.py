"""Forked processes, such as data workers, beside a backend that has threads."""

from ...data.fork_gc import leave_the_parents_garbage

__all__ = ["leave_the_parents_garbage"]
