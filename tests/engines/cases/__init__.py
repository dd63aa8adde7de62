"""All cases. A new one is one entry in the table of its kind."""

from tests.engines.cases import dense, disk, experts
from tests.engines.cases.case import Case, Rank

__all__ = ["CASES", "Case", "Rank"]

CASES: tuple[Case, ...] = (*dense.CASES, *experts.CASES, *disk.CASES)
