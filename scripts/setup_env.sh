#!/usr/bin/env bash
# Makes or updates the virtual environment of this checkout and prints its folder (the only line on stdout).
#
#   bash scripts/setup_env.sh [--python PYTHON] [--dev]
#
# --python: a command or a path; the environment is then .venv-<version> (without it python3 and .venv).
# --dev: with what the tests need. A second run with an unchanged pyproject.toml does nothing.
#
# torch comes first, at one version, by the machine's own pip settings (a CPU build where these offer one); after that a
# constraint holds it, so that no other package replaces it.
set -euo pipefail

TORCH=2.13.0
TRANSFORMER_ENGINE="2.12.0 2.20.2"  # their Python alone, for tests/te: nothing imports it from here by itself
TORCHVISION=0.28.0  # its Python alone, for tests of videos: compiled for a torch with CUDA, beside which alone it imports
python=python3 named=0 extras=""
while [ $# -gt 0 ]; do
  case "$1" in
    --python) [ $# -ge 2 ] || { echo "setup_env.sh: --python needs a command or a path" >&2; exit 2; }; python=$2 named=1; shift 2 ;;
    --dev) extras="[dev]"; shift ;;
    *) echo "setup_env.sh: unknown option $1 (known: --python PYTHON, --dev)" >&2; exit 2 ;;
  esac
done
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

version_of() { "$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
# pyenv answers for a Python that it has and that is not the chosen one; it is asked where that one lies.
if ! version=$(version_of) && command -v pyenv >/dev/null && known=$(pyenv latest "${python#python}" 2>/dev/null); then
  python="$(pyenv prefix "$known")/bin/python"
fi
if ! version=$(version_of); then
  why=$("$python" -c "" 2>&1 | head -n 1) || true
  echo "setup_env.sh: '$python' does not run here (${why##*: }). Give a Python 3.11 or newer that does: --python /path/to/python3.12" >&2
  exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "setup_env.sh: '$python' is Python $version; megaswift needs 3.11 or newer: --python python3.11 (or a path)" >&2
  exit 2
fi
env="$root/.venv"
[ "$named" = 0 ] || env="$root/.venv-$version"

want="$("$python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$root/pyproject.toml") $TORCH $TRANSFORMER_ENGINE $TORCHVISION $version"
stamp="$env/.megaswift-ready"
if [ -f "$stamp" ] && [ -x "$env/bin/python" ]; then
  have=$(cat "$stamp")
  if [ "$have" = "$want [dev]" ] || [ "$have" = "$want $extras" ]; then echo "$env"; exit 0; fi
fi

{
  echo "setting up $env (Python $version); the first time takes a few minutes"
  rm -f "$stamp"
  if ! [ -x "$env/bin/python" ] || [ "$("$env/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" != "$version" ]; then
    rm -rf "$env"
    if ! "$python" -m venv "$env"; then
      rm -rf "$env"
      echo "setup_env.sh: '$python -m venv' failed: is the venv module installed (Debian: python3-venv)?"
      exit 2
    fi
  fi
  pip=("$env/bin/python" -m pip install -qq)
  "${pip[@]}" "torch==$TORCH"
  "$env/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > "$env/constraint.txt"
  "${pip[@]}" -c "$env/constraint.txt" -e "$root$extras"
  for release in $([ -z "$extras" ] || echo "$TRANSFORMER_ENGINE"); do
    rm -rf "$env/te/$release"
    "${pip[@]}" --no-deps --no-compile --target "$env/te/$release" "transformer_engine==$release"
  done
  if [ -n "$extras" ]; then
    rm -rf "$env/torchvision"
    "${pip[@]}" --no-deps --no-compile --target "$env/torchvision" "torchvision==$TORCHVISION"
  fi
  echo "$want $extras" > "$stamp"
} >&2
echo "$env"
