"""One rank's error is every rank's error, over real gloo processes."""

from typing import Any

import pytest
import torch.distributed as dist

from lit_llm.agreement import raise_together
from lit_llm.gates.processes import run_ranks

WORLD_SIZE = 3
CASES = ["rank 1 only", "ranks 0 and 1", "peculiar", "unpicklable", "none"]


class Peculiar(Exception):
    """Cannot be rebuilt from its text, as errors with constructors of their own often cannot."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"code {code} at {place}")


def error_for(case: str, rank: int) -> Exception | None:
    errors: dict[tuple[str, int], Exception] = {
        ("rank 1 only", 1): KeyError("labels"),
        ("ranks 0 and 1", 0): ValueError("bad on rank 0"),
        ("ranks 0 and 1", 1): TypeError("bad on rank 1"),
        ("peculiar", 1): Peculiar(7, "layer 3"),
    }
    if case == "unpicklable" and rank == 1:
        return RuntimeError(lambda: rank)
    return errors.get((case, rank))


def raised(error: Exception | None, group: dist.ProcessGroup | None = None) -> tuple[str, str, str] | None:
    try:
        with raise_together(group):
            if error is not None:
                raise error
    except Exception as seen:
        return type(seen).__name__, str(seen), type(seen.__cause__).__name__
    return None


def every_case(rank: int) -> dict[str, Any]:
    """All cases on one set of ranks, one after the other: a rank that fell out of step would show in the next."""
    answers: dict[str, Any] = {case: raised(error_for(case, rank)) for case in CASES}
    pair = dist.new_group([0, 1])
    answers["pair"] = raised(ValueError("of the pair") if rank == 1 else None, pair) if rank < 2 else "not asked"
    return answers


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(every_case, WORLD_SIZE, timeout=60)


def test_an_error_of_rank_1_alone_is_raised_on_all_with_the_same_message(ranks: list[dict[str, Any]]) -> None:
    assert [answers["rank 1 only"] for answers in ranks] == [("KeyError", "'labels'", "NoneType")] * WORLD_SIZE


def test_of_two_errors_the_lowest_rank_s_is_raised_and_the_other_is_its_cause(ranks: list[dict[str, Any]]) -> None:
    causes = ["NoneType", "TypeError", "NoneType"]
    assert [answers["ranks 0 and 1"] for answers in ranks] == [("ValueError", "bad on rank 0", why) for why in causes]


def test_an_error_that_cannot_be_rebuilt_arrives_as_its_text(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["peculiar"] == ("Peculiar", "code 7 at layer 3", "NoneType")
    for other in (0, 2):
        assert ranks[other]["peculiar"] == ("ValueError", "Peculiar: code 7 at layer 3", "NoneType")


def test_an_error_that_cannot_be_pickled_arrives_as_its_text(ranks: list[dict[str, Any]]) -> None:
    kind, text, _ = ranks[1]["unpicklable"]
    assert kind == "RuntimeError" and "lambda" in text
    for other in (0, 2):
        assert ranks[other]["unpicklable"] == ("ValueError", f"RuntimeError: {text}", "NoneType")


def test_nothing_is_raised_where_nothing_failed(ranks: list[dict[str, Any]]) -> None:
    assert [answers["none"] for answers in ranks] == [None] * WORLD_SIZE


def test_only_the_ranks_of_the_group_take_part(ranks: list[dict[str, Any]]) -> None:
    error = ("ValueError", "of the pair", "NoneType")
    assert [answers["pair"] for answers in ranks] == [error, error, "not asked"]


def test_without_a_process_group_the_block_simply_runs() -> None:
    with raise_together():
        done = True
    assert done
    with pytest.raises(ZeroDivisionError), raise_together():
        _ = 1 / 0
