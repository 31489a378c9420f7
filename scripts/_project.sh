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

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    # The default python3 first, as it is the one that was chosen. Each is run rather than looked
    # up, as a pyenv shim exists also for versions that are not switched on.
    for candidate in python3 "${pythons[@]/#/python}" python; do
        if is_new_enough "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer on PATH; install one, or activate a virtual environment that has it."
}

export PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# The suite needs neither a network nor a display, and must not depend on having them.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 MPLBACKEND=Agg

# Each of the two workers would otherwise start a thread for every core.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MKL_NUM_THREADS=${MKL_NUM_THREADS:-1}
