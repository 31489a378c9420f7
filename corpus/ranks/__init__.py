"""Faults that take several ranks, and healthy models that look like them.

Each case is called on every rank of a process group, and makes that rank's model and batch.
"""

from corpus.ranks.blind_again import FAULTS as FAULTS_AGAIN
from corpus.ranks.blind_again import HEALTHY as HEALTHY_AGAIN
from corpus.ranks.blind_faults import FAULTS as FIRST_FAULTS
from corpus.ranks.blind_faults import HEALTHY as FIRST_HEALTHY
from corpus.ranks.blind_faults import Case, Made

FAULTS = (*FIRST_FAULTS, *FAULTS_AGAIN)
HEALTHY = (*FIRST_HEALTHY, *HEALTHY_AGAIN)

__all__ = ["FAULTS", "HEALTHY", "Case", "Made"]
