# Copy to noxfile.py, beside pyproject.toml.
#
# nox             the tests, with the oldest torch that the plugin takes and with the newest
# nox -s ranks    those marked `modelhealth_ranks(2)`, on two processes
# nox -s diff     what this checkout changes in the models beside main; `-- v1.2`: beside a tag
"""Sessions of nox that inspect the models."""

import shutil
from pathlib import Path

import nox

nox.options.sessions = ["tests"]
# The name pytest-modelhealth on the package index is not ours until it is published there, and
# could be anybody's: install from the project's repository, at a tag. OWNER is to be filled in.
MODELHEALTH = "pytest-modelhealth @ git+https://github.com/OWNER/pytest-modelhealth@v0.1.0"
CPU = {"PIP_EXTRA_INDEX_URL": "https://download.pytorch.org/whl/cpu"}  # torch without 2 GB of CUDA


@nox.session
@nox.parametrize(("python", "torch"), [("3.11", "2.8.*"), ("3.12", "2.9.*"), ("3.14", "2.*")])
def tests(session: nox.Session, torch: str) -> None:
    """Run all tests, and write the page of their models."""
    session.install(f"torch=={torch}", "-e", ".", MODELHEALTH, env=CPU)
    page = f"--modelhealth-html={session.create_tmp()}/page.html"
    session.run("python", "-m", "pytest", page, *session.posargs)


@nox.session
def ranks(session: nox.Session) -> None:
    """Run the tests on several ranks as torchrun starts them."""
    session.install("-e", ".", MODELHEALTH, env=CPU)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    pytest = ("-m", "pytest", "-m", "modelhealth_ranks", *session.posargs)
    session.run("python", *torchrun, *pytest, env={"OMP_NUM_THREADS": "2"})


@nox.session
def diff(session: nox.Session) -> None:
    """Run the tests on both sides, and fail where something got worse."""
    base = session.posargs[0] if session.posargs else "main"
    folder = Path(session.create_tmp()).resolve()
    copy = folder / "base"
    shutil.rmtree(copy, ignore_errors=True)
    session.run("git", "clone", "--quiet", "--shared", ".", copy, external=True)
    session.run("git", "-C", copy, "checkout", "--quiet", base, external=True)
    for root, run in ((copy, "base.json"), (Path.cwd(), "head.json")):
        session.install("-e", root, MODELHEALTH, env=CPU)
        with session.chdir(root):  # 5: it has no tests yet
            pytest = ("-m", "pytest", f"--modelhealth-json={folder / run}")
            session.run("python", *pytest, success_codes=[0, 1, 5])
    runs = (folder / "base.json", folder / "head.json")
    session.run("python", "-m", "pytest_modelhealth", "diff", *runs)
