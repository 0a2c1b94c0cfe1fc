#!/usr/bin/env bash
# Installs every system package that llmx needs, on Debian and Ubuntu.
#
#   scripts/install-system-packages.sh             what the tests need
#   scripts/install-system-packages.sh --minimal   what `make demo` needs
#   scripts/install-system-packages.sh --list      prints the packages and what they are for
#
# Quick and silent on the network when all is there. Asks nothing, starts no service.
set -euo pipefail

MINIMAL="
python3-venv     the virtual environment
g++              DeepSpeed builds its CPU extensions
git              provenance of a run
"
TESTS="
python3-dev      headers for DeepSpeed's extensions
openssh-client   all hosts are reached through ssh
openssh-server   the hosts of the test cluster
pdsh             launch.transport=pdsh
rsync            launch.sync=rsync
iproute2         the test cluster's networks: ip, ss, tc
util-linux       the test cluster's hosts: nsenter, unshare
procps           ps
openmpi-bin      launch.transport=openmpi
slurm-client     launch.transport=slurm
slurmctld        Slurm on the test cluster
slurmd           Slurm on the test cluster
munge            Slurm's authentication
libpmix-dev      Slurm loads libpmix.so for --mpi=pmix
zsh              tab completion
fish             tab completion
"
# Not everywhere a package (Ubuntu has a snap): the tests that want one skip without it.
OPTIONAL="
chromium           the page of runs in a browser
fonts-dejavu-core  a font for it
"

list=$MINIMAL$TESTS
case "${1:-}" in
  "") ;;
  --minimal) list=$MINIMAL; OPTIONAL="" ;;
  --list)
    echo "make demo:$MINIMAL"
    echo "make test, in addition:$TESTS"
    echo "make test, where there is such a package:$OPTIONAL"
    exit 0
    ;;
  *) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
packages=$(awk 'NF { print $1 }' <<<"$list")
optional=$(awk 'NF { print $1 }' <<<"$OPTIONAL")

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  cat >&2 <<EOF
This system has no apt-get; install what corresponds to these Debian packages, then go on:
$list
Fedora, RHEL, Rocky: python3-devel gcc-c++ git openssh-clients openssh-server pdsh rsync iproute
  iproute-tc util-linux procps-ng openmpi slurm slurm-slurmctld slurm-slurmd munge zsh fish
Arch: python gcc git openssh pdsh rsync iproute2 util-linux procps-ng openmpi slurm-llnl munge zsh
  fish
openSUSE: python3-devel gcc-c++ git openssh pdsh rsync iproute2 util-linux procps openmpi4
  slurm slurm-node munge zsh fish
EOF
  exit 1
fi

installed() {
  [[ $(dpkg-query --show --showformat='${Status}' "$1" 2>/dev/null) == *"ok installed" ]]
}
missing=()
for package in $packages; do
  installed "$package" || missing+=("$package")
done
wished=()
for package in $optional; do
  # Where the lists are here and do not have it, asking again at every call would not help.
  if compgen -G '/var/lib/apt/lists/*Packages*' >/dev/null; then
    apt-cache show "$package" >/dev/null 2>&1 || continue
  fi
  installed "$package" || wished+=("$package")
done
# A Python of one's own brings venv and headers along, a compiler may have another name: what
# works already is not installed again.
works() {
  case $1 in
    python3-venv) "${PYTHON:-python3}" -c 'import ensurepip, venv' ;;
    python3-dev) "${PYTHON:-python3}" -c \
      'import pathlib, sysconfig as s; pathlib.Path(s.get_path("include"), "Python.h").read_bytes()' ;;
    g++) command -v c++ ;;
    git | rsync) command -v "$1" ;;
    *) return 1 ;;
  esac >/dev/null 2>&1
}
needed=()
for package in ${missing[@]+"${missing[@]}"}; do
  works "$package" || needed+=("$package")
done

if [ ${#needed[@]} -eq 0 ] && [ ${#wished[@]} -eq 0 ]; then
  echo "system packages: all $(wc -w <<<"$packages $optional") are here"
  exit 0
fi
echo "system packages: installing ${needed[*]+"${needed[*]}"} ${wished[*]+"${wished[*]}"}"

if [ "$(id -u)" -ne 0 ] && ! command -v sudo >/dev/null; then
  [ ${#needed[@]} -gt 0 ] || exit 0
  echo "This needs root, and there is no sudo. As root: apt-get install ${needed[*]}" >&2
  exit 1
fi
as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

# The packages of sshd, Slurm and munge start their services; a policy that says no keeps them
# from it. One that is there already stays.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
  trap 'as_root rm -f $policy' EXIT
  printf '#!/bin/sh\nexit 101\n' | as_root tee $policy >/dev/null
  as_root chmod 755 $policy
fi

apt() {
  as_root env DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 \
    apt-get -y -qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 "$@"
}
# The lists may be old, or absent as in a container's image: only then are they fetched.
if ! apt install --no-install-recommends ${needed[@]+"${needed[@]}"} ${wished[@]+"${wished[@]}"} \
  >/dev/null 2>&1; then
  apt update
  [ ${#needed[@]} -eq 0 ] || apt install --no-install-recommends "${needed[@]}" >/dev/null
  [ ${#wished[@]} -eq 0 ] || apt install --no-install-recommends "${wished[@]}" >/dev/null 2>&1 ||
    echo "system packages: no ${wished[*]} here; the tests that want them are skipped"
fi
echo "system packages: done"
