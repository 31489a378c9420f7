"""A file is replaced as a whole, whenever the writer is killed, and the next removes its draft."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_modelhealth.drafts import new_name, replacing, sweep

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

WRITES = """
import sys
from pathlib import Path
from pytest_modelhealth.drafts import new_name, replacing

path = Path(sys.argv[1])
path.with_name(new_name()).mkdir()
print(flush=True)
while True:
    for letter in "ab":
        with replacing(path) as file:
            for _ in range(1000):
                file.write(letter * 1000)
"""


def test_a_killed_writer_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """What is there is old or new, and whole; drafts of a run that goes on stay."""
    path, own = tmp_path / "file.txt", tmp_path / new_name()
    path.write_text("a" * 1_000_000)
    own.touch()
    left = 0
    for moment in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", WRITES, str(path)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(0.003 * moment)
            assert len([*tmp_path.glob(".modelhealth-*")]) >= 2
            sweep(tmp_path)
            writer.kill()
        assert path.read_text() in ("a" * 1_000_000, "b" * 1_000_000)
        left += len([*tmp_path.glob(".modelhealth-*")]) - 1
        sweep(tmp_path)
        assert [*tmp_path.glob(".modelhealth-*")] == [own]
    assert left >= 5  # a folder each, and drafts
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(str(1 // 0))
    assert path.stat().st_size == 1_000_000
    assert [*tmp_path.glob(".modelhealth-*")] == [own]
