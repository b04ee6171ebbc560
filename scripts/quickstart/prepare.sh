# Sourced by the quickstart scripts: reads their options, goes to the checkout, finds the environment, makes the model.
#
# The script sets `out` and `parts`, and `algorithm` where it has that option; `quick` (this folder), `env`, `gpus` and `began` are set here.

self=$(basename "$0") setup=() env=""
known="--python PYTHON, --output FOLDER, --env FOLDER${algorithm:+, --algorithm grpo|ppo}"
stop() { echo "$self: $1" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case "$1" in
    --python) [ $# -ge 2 ] || stop "--python needs a command or a path"; setup=(--python "$2") ;;
    --output) [ $# -ge 2 ] || stop "--output needs a folder"; out=$(realpath -m "$2") ;;
    --env) [ $# -ge 2 ] || stop "--env needs a folder"; env=$(realpath -m "$2") ;;
    --algorithm) [ -n "${algorithm:-}" ] || stop "unknown option $1 (known: $known)"
      case "${2:-}" in grpo|ppo) algorithm=$2 ;; *) stop "--algorithm needs grpo or ppo" ;; esac ;;
    -h|--help) sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) stop "unknown option $1 (known: $known)" ;;
  esac
  shift 2
done
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ -n "$env" ] || env=$(bash scripts/setup_env.sh ${setup[@]+"${setup[@]}"})
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE  # each of many processes would compile the sources anew
quick="$PWD/scripts/quickstart"
began=$SECONDS

echo "== 1/$parts  a model that knows nothing"
told=$("$env/bin/python" "$quick/make_model.py" "$quick/data" "$out/model")
gpus=${told##*gpus }
echo "${told%$'\n'*}"
