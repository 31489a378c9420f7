# Sourced by the scripts beside it: enters the project root, and holds what they share.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"

# Newest first.
pythons=(3.14 3.13 3.12 3.11)
oldest_python=3.11

fail() {
    printf '%s: %s\n' "${0##*/}" "$1" >&2
    exit 1
}

export PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# The suite needs neither a network nor a display, and must not depend on having them.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 MPLBACKEND=Agg

# Each of the two workers would otherwise start a thread for every core.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MKL_NUM_THREADS=${MKL_NUM_THREADS:-1}
