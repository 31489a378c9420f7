"""Stands in for `gh api`: answers from a file of comments and pull requests, and writes to it.

``GH_STATE`` names the file. Filters are those of the real jq.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path

import jq

state_file = Path(os.environ["GH_STATE"])
state = json.loads(state_file.read_text(encoding="utf-8"))
parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["api"])
parser.add_argument("path")
parser.add_argument("--method", default="GET")
parser.add_argument("--field", action="append", default=[])
parser.add_argument("--raw-field", action="append", default=[])
parser.add_argument("--jq", default=".")
parser.add_argument("--paginate", action="store_true")
parser.add_argument("--silent", action="store_true")
given = parser.parse_args()
assert os.environ["GH_TOKEN"] == "secret"

fields = dict(pair.split("=", 1) for pair in given.field)
for name, value in fields.items():
    fields[name] = Path(value[1:]).read_text("utf-8") if value.startswith("@") else value
fields |= dict(pair.split("=", 1) for pair in given.raw_field)
state["calls"].append(f"{given.method} {given.path}")

route = f"{given.method} {given.path.removeprefix('repos/me/digits/')}"
if route == "GET pulls":
    answer = [one for one in state["pulls"] if one["from"] == fields["head"]]
elif route == "GET issues/7/comments":
    answer = state["comments"]
elif route == "POST issues/7/comments":
    answer = {
        "id": 100 + len(state["comments"]),
        "user": {"login": "github-actions[bot]"},
        **fields,
    }
    state["comments"].append(answer)
elif found := re.fullmatch(r"PATCH issues/comments/(\d+)", route):
    answer = next(one for one in state["comments"] if one["id"] == int(found[1]))
    answer |= fields
else:
    sys.exit(f"gh: Not Found (HTTP 404): {route}")
state_file.write_text(json.dumps(state), encoding="utf-8")
if not given.silent:
    for line in jq.compile(given.jq).input_value(answer):
        print(line)  # noqa: T201
