"""Shared by all drivers, and public, so that a third party's driver need not copy it."""
