# Sourced by the scripts beside it: enters the project root and puts a Python environment that
# holds the project and its dependencies first on PATH. Uses the active virtual environment,
# or else .venv, which it makes. The argument says what for: tests, or the demo, which needs less.

source "$(dirname -- "${BASH_SOURCE[0]}")/_project.sh"

# The root belongs to it: an environment shared by two checkouts holds only one of them.
wanted_stamp() {
    printf '%s\n' "$root"
    cat pyproject.toml constraints.txt hatch_build.py pytest_modelhealth/statistics/native/*.[ch] | cksum
}

# Whether the environment holds what is needed; what the tests need includes what the demo does.
is_installed() {
    local found
    for found in "$stamp" "$venv/.modelhealth-installed"; do
        if [[ -f $found && -x $venv/bin/python && $(<"$found") == "$(wanted_stamp)" ]]; then
            return
        fi
    done
    return 1
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
    local reason="first run, about a minute" stamps=("$venv/.modelhealth-installed"*)
    if [[ -f ${stamps[0]} ]]; then
        reason="the dependencies or the checkout changed, or the demo needed less"
    fi
    printf 'installing into %s (%s)\n' "${venv#"$root"/}" "$reason" >&2
    # Gone before the install and written after it: a stamp never vouches for half an install.
    rm -f -- "${stamps[@]}"
    if [[ $venv == "$root/.venv" ]]; then
        make_venv
        # Not in an environment of the user's, whose pip is theirs.
        [[ -z ${newer_pip-} ]] || "$venv/bin/python" -m pip install -qq "$newer_pip" || true
    fi
    is_new_enough "$venv/bin/python" ||
        fail "$venv has a Python older than 3.11; deactivate or remove it, then run this again."
    # Bytecode is left to the first import of each file: compiling everything takes longer than
    # all downloads.
    "$venv/bin/python" -m pip install -qq --no-compile -c constraints.txt "${needed[@]}" ||
        fail "pip could not install the project into $venv; its message is above."
    wanted_stamp >"$stamp"
}

venv=${VIRTUAL_ENV:-$root/.venv}
case $1 in
    demo)
        stamp=$venv/.modelhealth-installed-demo
        needed=(-e . scikit-learn)
        ;;
    tests)
        stamp=$venv/.modelhealth-installed
        newer_pip='pip>=25' # finds what so many need in half the time
        needed=(-e '.[test,html,docs]')
        ;;
esac

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
