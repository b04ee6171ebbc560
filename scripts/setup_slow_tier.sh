#!/usr/bin/env bash
# Installs the programs that the slow tier needs beyond Python, on Debian and Ubuntu. Without one of them its tests are skipped.
#
#   bash scripts/setup_slow_tier.sh [--dry_run]
#
# --dry_run: print what is missing and the command, and install nothing.
#
# A folder of published schemas is not installed: MEGASWIFT_SCHEMAS names it (CONTRIBUTING.md, "The slow tier").
set -euo pipefail

# program, its package, what tests do with it
needed="
slurmctld slurm-wlm a Slurm cluster of several nodes on this machine
slurmd slurm-wlm nodes of that cluster
sbatch slurm-wlm megaswift submit to Slurm
munged munge authentication of Slurm
sshd openssh-server hosts of an ssh cluster
ip iproute2 machines as network namespaces
debootstrap debootstrap the base system of the CPU image
buildah buildah building the CPU image
chromium chromium reports and the board in a browser
"

dry_run=0
for word in "$@"; do
  case "$word" in
    --dry_run|--dry-run) dry_run=1 ;;
    *) echo "setup_slow_tier.sh: unknown option $word (known: --dry_run)" >&2; exit 2 ;;
  esac
done

PATH=$PATH:/usr/sbin
packages=()
while read -r program package purpose; do
  [ -n "$program" ] || continue
  if command -v "$program" >/dev/null; then
    echo "ok       $program"
  else
    echo "missing  $program: $purpose (package $package)"
    case " ${packages[*]-} " in *" $package "*) ;; *) packages+=("$package") ;; esac
  fi
done <<< "$needed"

if [ -z "${MEGASWIFT_SCHEMAS:-}" ]; then
  echo "note     MEGASWIFT_SCHEMAS is not set: manifests are checked against the tables of the tests only (CONTRIBUTING.md)"
fi
[ "$(id -u)" = 0 ] || echo "note     network namespaces, Slurm and building images need root: run the slow tier as root"
[ ${#packages[@]} -gt 0 ] || exit 0

root=()
[ "$(id -u)" = 0 ] || root=(sudo)
install=(${root[@]+"${root[@]}"} apt-get install -y --no-install-recommends "${packages[@]}")
if [ "$dry_run" = 1 ]; then
  echo "${install[*]}"
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  echo "setup_slow_tier.sh: no apt-get on this system; install the equivalents of these Debian packages: ${packages[*]}" >&2
  exit 2
fi
export DEBIAN_FRONTEND=noninteractive
${root[@]+"${root[@]}"} apt-get update -qq
"${install[@]}"
