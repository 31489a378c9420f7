"""Stands in for `gh api`: answers from the JSON file ``GH_STATE``, and writes to it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import jq

file = Path(os.environ["GH_STATE"])
state = json.loads(file.read_text(encoding="utf-8"))
parser = argparse.ArgumentParser()
for option in ("--method", "--field", "--raw-field", "--jq"):
    parser.add_argument(option)
given, (_, *flags, path) = parser.parse_known_args()
assert os.environ["GH_TOKEN"] == "secret"
assert {*flags} <= {"--paginate", "--silent"}

route = f"{given.method or 'GET'} {path.removeprefix('repos/me/digits/')}"
state["calls"].append(route)
if route == "GET pulls":
    answer = [one for one in state["pulls"] if f"head={one['from']}" == given.raw_field]
elif route == "GET issues/7/comments":
    answer = state["comments"]
else:
    assert given.field == "body=@diff.md"
    body = Path("diff.md").read_text(encoding="utf-8")
    if route == "POST issues/7/comments":
        answer = {"id": 100 + len(state["comments"]), "user": {"login": "github-actions[bot]"}}
        state["comments"].append(answer)
    else:
        number = int(route.removeprefix("PATCH issues/comments/"))
        (answer,) = [one for one in state["comments"] if one["id"] == number]
    answer["body"] = body
file.write_text(json.dumps(state), encoding="utf-8")
if "--silent" not in flags:
    sys.stdout.writelines(f"{line}\n" for line in jq.compile(given.jq).input_value(answer))
