"""The processes of a command: their start, signals and end."""
