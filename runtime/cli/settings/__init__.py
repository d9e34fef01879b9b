"""Settings: read from files and options, resolved, explained before a run, and searched for."""
