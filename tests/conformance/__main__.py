"""`python -m drivetrain.conformance --backend NAME`: pytest with this suite and its options.

pytest does not read the options of an installed package's `conftest.py`, hence the plugin.
"""

import argparse
import sys

import pytest

SUITE = ("-p", "drivetrain.conformance.plugin", "--pyargs", "drivetrain.conformance")
BRIEF = ("--no-header", "--tb=no", "-rN")
"""The plugin says what is broken; `--tb=short` after these shows where in the suite."""

EXAMPLES = """examples:
  python -m drivetrain.conformance --backend mine
  python -m drivetrain.conformance --backend mine --nproc 2 -k gradient --report report
  python -m drivetrain.conformance --backend mine --backend-set threads=2 --peer other:2
  python -m drivetrain.conformance --backend mine -x --tb=short

-k EXPR runs what matches. All other arguments are pytest's.

exit codes: 0 all laws are kept; 1 some are not; 4 wrong arguments; 5 nothing ran; 69 the driver
cannot run here
"""


def main() -> int:
    """Run pytest on the suite. All arguments are pytest's, and those of the plugin."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        parser().print_help()
        return 0
    return int(pytest.main([*SUITE, *BRIEF, *sys.argv[1:]]))


def parser() -> argparse.ArgumentParser:
    """Return the parser that prints the help; pytest's own help has 500 lines."""
    from .plugin import OPTIONS

    made = argparse.ArgumentParser(
        "python -m drivetrain.conformance",
        description="Prove that a driver keeps the laws of drivetrain's contract.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, details in OPTIONS.items():
        made.add_argument(name, **details)
    made.add_argument("-k", metavar="EXPR", help="only cases that match, as in pytest")
    return made


if __name__ == "__main__":
    sys.exit(main())
