# Sourced by the scripts beside it: enters the project root and puts a Python environment that
# holds the project and its test dependencies first on PATH. Uses the active virtual environment,
# or else .venv, which it makes.

source "$(dirname -- "${BASH_SOURCE[0]}")/_project.sh"

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

# The root belongs to it: an environment shared by two checkouts holds only one of them.
wanted_stamp() {
    printf '%s\n' "$root"
    cat pyproject.toml constraints.txt hatch_build.py pytest_modelhealth/statistics/native/*.[ch] | cksum
}

is_installed() {
    [[ -f $stamp && -x $venv/bin/python && $(<"$stamp") == "$(wanted_stamp)" ]]
}

make_venv() {
    local base_python
    # Without pip it is what an interrupted run left, or no environment at all.
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    base_python=$(find_python)
    "$base_python" -m venv --clear "$venv" ||
        fail "could not make .venv with $base_python; on Debian and Ubuntu, install python3-venv."
}

install_project() {
    local reason="first run, about a minute"
    if [[ -f $stamp ]]; then
        reason="the dependencies or the checkout changed"
    fi
    printf 'installing into %s (%s)\n' "${venv#"$root"/}" "$reason" >&2
    # Gone before the install and written after it: a stamp never vouches for half an install.
    rm -f -- "$stamp"
    if [[ $venv == "$root/.venv" ]]; then
        make_venv
    fi
    is_new_enough "$venv/bin/python" ||
        fail "$venv has a Python older than 3.11; deactivate or remove it, then run this again."
    "$venv/bin/python" -m pip install -qq \
        -c constraints.txt -e '.[test,html]' ||
        fail "pip could not install the project into $venv; its message is above."
    wanted_stamp >"$stamp"
}

venv=${VIRTUAL_ENV:-$root/.venv}
stamp=$venv/.modelhealth-installed

if [[ $venv != "$root/.venv" && ! -x $venv/bin/python ]]; then
    fail "VIRTUAL_ENV names $venv, which has no bin/python; run \`unset VIRTUAL_ENV\` or make it again."
fi

if ! is_installed; then
    (
        # Two first runs at once would clear each other's environment. macOS has no flock.
        if command -v flock >/dev/null; then
            flock 9
        fi
        is_installed || install_project
    ) 9<pyproject.toml
fi

export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
unset PYTHONHOME
