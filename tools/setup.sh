#!/usr/bin/env bash
# Set up a Debian machine for polarnode: Debian packages, a virtual environment, and SGLang. Prints each step; quick if nothing is missing.
# `setup.sh test` also installs what only the tests need.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '· %s\n' "$*"; }

# Run a command, and print what it says only if it fails: pip and apt warn on every other machine of something that is no matter here.
quietly() {
  local said
  said=$("$@" 2>&1) || { printf '%s\n' "$said" >&2; return 1; }
}

# Commands and their Debian packages. runc beside crun: crun refuses mixed cgroups. catatonit is every container's first process.
wanted=(podman:podman runc:runc iptables:iptables mmdebstrap:mmdebstrap git:git make:make)
# chromium: the page in a real browser. npm: the real Qwen3 tokenizer comes from its registry; ip and openssl: agents on another machine, a namespace, and their certificates
# newuidmap: a node without root, which is tested with a user that the tests make
[ "${1:-}" = test ] && wanted+=(npm:npm ip:iproute2 openssl:openssl chromium:chromium newuidmap:uidmap)
# postgres: the log of a fleet, in clusters that the tests make; its programs are in a folder of their own
[ "${1:-}" = test ] && { ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || wanted+=(postgres:postgresql); }
[ "$(id -u)" = 0 ] || wanted+=(newuidmap:uidmap nsenter:util-linux)
PATH=$PATH:/usr/sbin:/sbin # where a user's own path does not lead
missing=()
for pair in "${wanted[@]}"; do
  command -v "${pair%%:*}" >/dev/null 2>&1 || missing+=("${pair##*:}")
done
[ -e /usr/libexec/podman/catatonit ] || [ -e /usr/bin/catatonit ] || missing+=(catatonit)
# of the node that playwright brings, which chromium's own packages do not ask for
[ "${1:-}" = test ] && ! ldconfig -p | grep -q libatomic.so.1 && missing+=(libatomic1)
[ -e /usr/lib/podman/netavark ] || [ -e /usr/libexec/podman/netavark ] || missing+=(netavark)
python=${PYTHON:-python3}
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3 python3-venv)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ]; then
    echo "This user is not root. An administrator has to run, once: apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
  say "installing Debian packages: ${missing[*]}"
  # the package would make a cluster of the machine's own and start it; the tests need the programs alone
  if [[ " ${missing[*]} " == *" postgresql "* ]] && [ ! -e /etc/postgresql-common/createcluster.conf ]; then
    mkdir -p /etc/postgresql-common
    echo 'create_main_cluster = false' > /etc/postgresql-common/createcluster.conf
  fi
  quietly apt-get update -qq
  DEBIAN_FRONTEND=noninteractive quietly apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
  echo "polarnode needs Python 3.11 to 3.13 (SGLang has wheels for no other): set PYTHON=/path/to/python3.11" >&2
  exit 1
}

# forks by freezing; where it cannot be had, their tests are skipped with doctor's words
if [ "${1:-}" = test ] && [ "$(id -u)" = 0 ]; then
  tools/criu.sh || say "no criu: the tests of forks by freezing are skipped"
fi

extra=cpu
command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && extra=gpu
stamp=.venv/polarnode-$extra-$(cat pyproject.toml tools/constraints-$extra.txt tools/setup.sh | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
  [ -x .venv/bin/python ] || { say "making .venv with $("$python" --version)"; "$python" -m venv .venv; }
  pip=(quietly .venv/bin/python -m pip --quiet --quiet --disable-pip-version-check)
  if [ "$extra" = gpu ]; then
    say "installing polarnode with full SGLang for GPUs (about 4.3 GB, some minutes)"
    "${pip[@]}" install --constraint tools/constraints-gpu.txt --editable '.[gpu,test]'
  else
    say "installing polarnode with the slim SGLang for CPUs (about 0.7 GB, a minute or two; 3 GB where pip finds no CPU build of torch)"
    "${pip[@]}" install --constraint tools/constraints-cpu.txt --editable '.[cpu,test]'
    "${pip[@]}" install --no-deps sglang==0.5.23 # its own dependencies include CUDA packages that a CPU never loads
  fi
  rm -f .venv/polarnode-*
  touch "$stamp"
fi

# Reference implementations for tests only, each without its dependencies: trl for its chat templates (its dependencies are pandas, datasets and
# accelerate), renderers for how it writes and parses turns, swebench for its specs and grader. What renderers and swebench import is listed; the
# GPU version of sglang includes two of them.
oracles=(trl==1.16.0 renderers==0.1.12 prime-pydantic-config==0.4.3 swebench==5.0.2 unidiff==1.0.1)
[ "$extra" = cpu ] && oracles+=(openai-harmony==0.0.8 tiktoken==0.14.0)
# Trainers whose own classes our projections are tested with (20 MB to download, 151 MB installed). They are in .venv/oracles, where only
# tests/kits/trainers_program.py and tests/kits/trl_program.py look: some contain a package named `tests`, and transformers behaves differently when
# accelerate is installed. peft replays the rows of adapters. tinker imports protobuf; TRL's GRPOTrainer imports the packages after it.
beside=(
  verl==0.9.1 skyrl==0.3.0 areal==1.0.4 verifiers==0.4.0 atroposlib==0.4.0 tinker==0.38.0 tinker-cookbook==0.6.1 protobuf==7.36.2
  peft==0.21.2 accelerate==1.15.0 datasets==5.2.0 pandas==3.1.1 dill==0.4.1 multiprocess==0.70.19 xxhash==4.1.0 fsspec==2026.9.0 python-dateutil==4.0.0 six==1.17.0
)
compared=.venv/polarnode-oracles-${stamp##*-} # its name begins like the other stamp's: a new environment removes both
if [ "${1:-}" = test ] && [ ! -e "$compared" ]; then
  say "installing reference packages for the tests: ${oracles[*]} ${beside[*]}"
  quietly .venv/bin/python -m pip --quiet --quiet --disable-pip-version-check install --no-deps "${oracles[@]}"
  rm -rf .venv/oracles
  quietly .venv/bin/python -m pip --quiet --quiet --disable-pip-version-check install --no-deps --target .venv/oracles "${beside[@]}"
  touch "$compared"
fi
say "set up: .venv ($extra)"
