"""Experiment trackers: the curves of a run in TensorBoard, Weights & Biases, MLflow or Trackio."""

from .tracker import TRACKERS, Tracker

__all__ = ["TRACKERS", "Tracker"]
