"""Tables and pages that show runs, checkpoints and drivers to people."""
