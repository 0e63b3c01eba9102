"""What every gate, check and drill answers with."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Verdict"]


@dataclass(frozen=True)
class Verdict:
    """The outcome of one gate: what was measured, what was allowed, and what was done to find out.

    A gate passes if ``measured <= threshold``; ``passed`` states it so that nobody has to compare again.

    Attributes:
        gate: the gate's registered name.
        passed: whether the technique changed nothing that it should not.
        measured: the worst error found, in the unit that ``evidence`` names.
        threshold: the largest error allowed, in the same unit.
        evidence: plain values (numbers, strings, lists, dicts) that say what was compared.
        seconds: how long the gate took.

    Example:
        >>> verdict = Verdict("demo", True, 2.5e-7, 1e-5, {"unit": "relative gradient error"}, 0.5)
        >>> print(verdict)
        PASS demo: 2.5e-07 <= 1e-05 (relative gradient error), 0.5 s
    """

    gate: str
    passed: bool
    measured: float
    threshold: float
    evidence: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        sign = "<=" if self.measured <= self.threshold else ">" if self.measured > self.threshold else "is not <="
        unit = f" ({self.evidence['unit']})" if "unit" in self.evidence else ""
        reason = f": {self.evidence['reason']}" if not self.passed and "reason" in self.evidence else ""
        return (
            f"{'PASS' if self.passed else 'FAIL'} {self.gate}: {self.measured:.3g} {sign} {self.threshold:.3g}{unit}, "
            f"{self.seconds:.1f} s{reason}"
        )

    def scalars(self) -> dict[str, float]:
        """Values for a logger: ``gate/<name>/passed``, ``…/measured``, ``…/threshold``, ``…/seconds``."""
        prefix = f"gate/{self.gate}"
        return {
            f"{prefix}/passed": float(self.passed),
            f"{prefix}/measured": self.measured,
            f"{prefix}/threshold": self.threshold,
            f"{prefix}/seconds": self.seconds,
        }

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))
