"""Snapshots: a report as a file that people review, and drift from it judged by its noise.

`recording` takes what is kept from reports, without pytest; `snapshot` is what that is,
`file_format` writes and reads it, `tolerances` is how far a statistic may move. `changes` puts two
snapshots side by side, `detection` finds what drifted and what began it, and `drift` is the result
in words. `extension` is what syrupy calls.
"""
