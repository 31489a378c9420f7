"""Snapshots: a report as a file that people review, and drift from it judged with a tolerance.

`file_format` writes and reads the file, `tolerances` says how far a statistic may move, `drift`
compares two snapshots and explains, `extension` is the part that syrupy calls.
"""

from pytest_modelhealth.snapshot.extension import HealthSnapshot, HealthSnapshotExtension

__all__ = ["HealthSnapshot", "HealthSnapshotExtension"]
