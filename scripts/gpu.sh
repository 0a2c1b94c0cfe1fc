#!/usr/bin/env bash
# What the GPUs of this machine do, in ten minutes: sets up, then runs `python -m benchmarks.gpu`.
#
#   scripts/gpu.sh                      packages from the index
#   scripts/gpu.sh --wheels DIR         from the wheels in DIR, on a machine without an index
#   scripts/gpu.sh ... --parts mfu      further words go to `python -m benchmarks.gpu`
#
# The torch of this machine's python is used where it has one (PYTHON= names another python); what
# is missing is installed into VENV (default .venv-gpu). The table lands in benchmarks/results/.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv-gpu}
WHEELS=
words=()
while [ $# -gt 0 ]; do
  case $1 in
    --wheels)
      [ $# -gt 1 ] || { echo "--wheels needs a directory" >&2; exit 2; }
      WHEELS=$2
      shift 2
      ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) words+=("$1"); shift ;;
  esac
done

if [ -n "$WHEELS" ] && ! compgen -G "$WHEELS/*.whl" >/dev/null; then
  echo "--wheels $WHEELS: no *.whl in there" >&2
  exit 2
fi
if [ ! -e "$VENV/.installed" ]; then
  # The outer python may be a virtual environment itself, which --system-site-packages would pass
  # over: its packages are named in a .pth file instead.
  "$PYTHON" -m venv --clear --without-pip "$VENV"
  inner=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  "$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$inner/outer.pth"
  printf '%s\n%s\n' "$PWD" "$PWD/launchers" >"$inner/llmx-checkout.pth"
  pip() { "$PYTHON" -m pip --python "$VENV/bin/python" --disable-pip-version-check "$@"; }
  if [ -n "$WHEELS" ]; then
    pip install --quiet --no-index --no-deps --no-compile --upgrade "$WHEELS"/*.whl
  else
    index=$(scripts/torch-index.sh)
    if [ -n "$index" ] && ! "$PYTHON" -c 'import torch' 2>/dev/null; then
      pip install --quiet "$(grep '^torch==' constraints.txt)" --index-url "$index"
    fi
    pip install --quiet -e .
  fi
  touch "$VENV/.installed"
fi
missing=$("$VENV/bin/python" - <<'PY'
import importlib.util
names = "torch deepspeed transformers datasets hydra omegaconf accelerate safetensors yaml rich psutil"
print(*(name for name in names.split() if importlib.util.find_spec(name) is None))
PY
)
if [ -n "$missing" ]; then
  echo "not installed: $missing. Put their wheels into --wheels DIR, or install them; then again." >&2
  rm -f "$VENV/.installed"
  exit 2
fi
# DeepSpeed's launcher is looked for beside python.
export PATH="$PWD/$VENV/bin:$PATH"
exec "$VENV/bin/python" -m benchmarks.gpu --out benchmarks/results ${words[@]+"${words[@]}"}
