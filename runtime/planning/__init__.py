"""Compares ways to place a run on ranks, by what their steps need, without these ranks."""
