"""`python -m drivetrain.cli`, which launched ranks are started with."""

from . import main

main()
