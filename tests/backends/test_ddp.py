"""The ddp driver keeps the laws."""

import pytest

from drivetrain.conformance import Case, cases
from drivetrain.conformance.law_6_resume import resumed_run_of_three_ranks_is_bit_exact
from drivetrain.conformance.subject import Subject

FINDING = {"find_unused_parameters": True}


@pytest.mark.parametrize("case", cases("ddp", num_processes=2), ids=str)
def test_laws(case: Case) -> None:
    case.check()


@pytest.mark.parametrize(
    "case",
    [case for case in cases("ddp", num_processes=2, options=FINDING) if case.law == "1_absent"],
    ids=str,
)
def test_absent_gradients_where_they_are_looked_for(case: Case) -> None:
    case.check()
    assert case.refused is None


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_each_rank_resumes_with_its_own_buffers(backend: str) -> None:
    resumed_run_of_three_ranks_is_bit_exact(Subject(backend, 3, {"sync_buffers": False}))


def test_a_static_graph_resumes_bit_by_bit_on_three_ranks() -> None:
    resumed_run_of_three_ranks_is_bit_exact(Subject("ddp", 3, {"static_graph": True}))
