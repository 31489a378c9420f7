"""The jobs for GitLab, run as its runner does; notes go to a server that answers as GitLab."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import parse_qs

import pytest
import yaml

from .conftest import Project
from .project import NAN, RESIDUAL, git

RECIPE = Path(__file__).parents[2] / "recipes" / "gitlab" / ".gitlab-ci.yml"
NOTES = "/api/v4/projects/3/merge_requests/7/notes"

pytestmark = pytest.mark.slow  # each runs tools in processes of their own


class Server(HTTPServer):
    """Keeps the notes of one merge request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.notes: list[dict[str, Any]] = [{"id": 1, "body": "a note of somebody"}]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(self.path.startswith(f"{NOTES}?"), self.server.notes)

    def do_POST(self) -> None:
        self.server.notes.append({"id": len(self.server.notes) + 1, "body": self._body()})
        self._answer(self.path == NOTES, {})

    def do_PUT(self) -> None:
        body = self._body()
        ours = [one for one in self.server.notes if self.path == f"{NOTES}/{one['id']}"]
        for note in ours:
            note["body"] = body
        self._answer(bool(ours), {})

    def log_message(self, *told: object) -> None:
        """Say nothing."""

    def _body(self) -> str:
        sent = self.rfile.read(int(self.headers["Content-Length"])).decode()
        return parse_qs(sent, strict_parsing=True)["body"][0]

    def _answer(self, found: bool, answer: object) -> None:
        found = found and self.headers["PRIVATE-TOKEN"] == "a token"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


@pytest.fixture
def server() -> Iterator[Server]:
    """GitLab's, on a port of this machine."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(job: str, project: Project, server: Server | None = None) -> subprocess.CompletedProcess:
    """Run the script of a job; without a `server`, where there is no token either."""
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    tree = recipe[job]
    given = recipe[tree["extends"]]["variables"] | tree.get("variables", {})
    given |= tree.get("parallel", {}).get("matrix", [{}])[0]
    variables = project.variables | {
        "CI_API_V4_URL": f"http://127.0.0.1:{server.server_port if server else 0}/api/v4",
        "CI_MERGE_REQUEST_PROJECT_ID": "3",
        "CI_MERGE_REQUEST_IID": "7",
        "CI_MERGE_REQUEST_DIFF_BASE_SHA": git(project.root, "rev-parse", "main"),
        "CI_PROJECT_DIR": str(project.root),
    }
    variables |= {name: Template(value).substitute(variables) for name, value in given.items()}
    if server:
        variables["NOTES_TOKEN"] = "a token"
    script = "\n".join(["set -eo pipefail", *tree["script"]])
    return subprocess.run(
        ["bash", "-c", script], cwd=project.root, env=variables, capture_output=True, text=True
    )


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl, as in the image of the job")
def test_a_merge_request(project: Project, server: Server) -> None:
    """Its one note tells each push, and a model that fails stands at its line."""
    origin = project.folder / "origin"
    shutil.copytree(project.root, origin)
    git(project.root, "remote", "add", "origin", str(origin))
    git(project.root, "checkout", "--quiet", "-b", "change")
    project.change("digits.py", RESIDUAL, RESIDUAL.replace("x + ", ""))
    (project.root / ".gitignore").write_text("health\ndiff\n.pytest_cache\n__pycache__\n")
    project.commit("Ignore")

    ended = run("health-diff", project, server)
    assert ended.returncode == 0, ended.stderr
    told = (project.root / "diff" / "diff.md").read_text(encoding="utf-8")
    assert "modelhealth: 1 test changed" in told
    assert [note["body"] for note in server.notes[1:]] == [told]

    git(project.root, "checkout", "--quiet", "change")
    project.change("digits.py", *NAN)
    ended = run("model-health", project)
    assert ended.returncode == 1
    issues = json.loads((project.root / "health" / "quality.json").read_text(encoding="utf-8"))
    assert issues[0]["location"]["path"] == "digits.py"
    assert {"junit.xml", "page.html"} <= {path.name for path in (project.root / "health").iterdir()}

    ended = run("health-diff", project, server)
    assert ended.returncode == 1, ended.stderr
    said = (project.root / "diff" / "diff.md").read_text(encoding="utf-8")
    assert "**`worse: tests/" in said
    assert [note["body"] for note in server.notes] == ["a note of somebody", said]
