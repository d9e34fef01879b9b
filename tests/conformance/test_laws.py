"""The laws, as pytest collects them; `--backend` says for which driver."""

import pytest

# absolute: pytest may import this file as a module of `conformance`, after the folder it lies in
from drivetrain.conformance import Case, cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    backend = option("backend", None)
    if backend is None:
        missing = "which driver? run `python -m drivetrain.conformance --backend NAME`"
        if option("pyargs"):  # asked for by the name of the package: nothing run is an error
            raise pytest.UsageError(missing)
        skipped = pytest.param(None, marks=pytest.mark.skip(reason=missing), id="no-backend")
        metafunc.parametrize("case", [skipped])
        return
    pairs = [text.partition("=") for text in option("backend_set")]
    chosen = cases(
        backend,
        num_processes=option("nproc"),
        options={key: value for key, _, value in pairs},
        peers=option("peer"),
        allow_unavailable=option("allow_unavailable"),
    )
    metafunc.parametrize("case", chosen, ids=str)


def test_law(case: Case) -> None:
    case.check()
