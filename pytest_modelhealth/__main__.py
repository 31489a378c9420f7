"""``python -m pytest_modelhealth COMMAND``: what is done outside of a test run."""

import sys

from pytest_modelhealth.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
