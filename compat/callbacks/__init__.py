"""Callbacks, and the state and control that they see."""
