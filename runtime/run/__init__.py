"""The run folder and the display of a run: records, report, progress."""
