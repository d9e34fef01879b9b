"""Evaluation and prediction loops, and what they return."""
