"""`python -m drivetrain.conformance --backend NAME`: pytest with this suite and its options.

pytest does not read the options of an installed package's `conftest.py`, hence the plugin.
"""

import sys

import pytest


def main() -> int:
    """All arguments are pytest's, and those of the plugin."""
    suite = ["-p", "drivetrain.conformance.plugin", "--pyargs", "drivetrain.conformance"]
    return int(pytest.main([*suite, *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
