"""What a verdict prints, logs and serialises to."""

import dataclasses
import json

import pytest

from lit_llm.verdict import Verdict

PASSED = Verdict("packing_isolation", True, 2e-7, 1e-5, {"unit": "logit difference", "documents": [3, 4]}, 1.25)
FAILED = Verdict("packing_isolation", False, 0.065, 1e-5, {"unit": "logit difference", "reason": "layer 3 leaks"}, 2.0)
NOT_A_NUMBER = Verdict("fp8_drift", False, float("nan"), 0.1)


def test_prints_as_one_line_that_says_what_was_measured() -> None:
    assert str(PASSED) == "PASS packing_isolation: 2e-07 <= 1e-05 (logit difference), 1.2 s"
    assert str(FAILED) == "FAIL packing_isolation: 0.065 > 1e-05 (logit difference), 2.0 s: layer 3 leaks"


def test_a_measurement_that_is_not_a_number_does_not_read_as_a_comparison_that_held() -> None:
    assert str(NOT_A_NUMBER) == "FAIL fp8_drift: nan is not <= 0.1, 0.0 s"


def test_a_gate_may_fail_for_a_reason_that_no_number_shows() -> None:
    verdict = Verdict("context_parallel_parity", False, 0.0, 1e-5, {"reason": "attention was never called"})
    assert str(verdict) == "FAIL context_parallel_parity: 0 <= 1e-05, 0.0 s: attention was never called"


def test_logs_as_scalars_under_its_own_name() -> None:
    assert FAILED.scalars() == {
        "gate/packing_isolation/passed": 0.0,
        "gate/packing_isolation/measured": 0.065,
        "gate/packing_isolation/threshold": 1e-5,
        "gate/packing_isolation/seconds": 2.0,
    }


def test_comes_back_from_json() -> None:
    assert Verdict(**json.loads(PASSED.to_json())) == PASSED


def test_cannot_be_changed_and_shares_no_evidence_with_another() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PASSED.passed = False  # type: ignore[misc]
    assert Verdict("a", True, 0.0, 0.0).evidence is not Verdict("b", True, 0.0, 0.0).evidence
