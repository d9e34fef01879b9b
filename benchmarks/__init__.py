"""drivetrain beside a plain loop and its peers: `python -m benchmarks --help`."""
