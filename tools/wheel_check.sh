#!/usr/bin/env bash
# Make a wheel from a clean clone, install it with [node] in an empty environment elsewhere, and run the README's first task there on a simulated
# engine. Needs root, Podman and a package index; Pi's image is built the first time. KEEP=1 leaves the folder. Uncommitted changes are not in it.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
[ -n "${KEEP:-}" ] || trap 'rm -rf "$work"' EXIT
step() { printf '\n── %s\n' "$*"; }

step "a wheel from a clean clone, in $work"
git clone --quiet --depth 1 "file://$PWD" "$work/clone"
sed -n '/^# hello.toml$/,/^```$/p' "$work/clone/README.md" | sed '$d' >"$work/hello.toml"
grep -q '^instruction = ' "$work/hello.toml" || { echo "README.md has no hello.toml" >&2; exit 1; }
"${PYTHON:-python3}" -m venv "$work/environment"
pip=("$work/environment/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" wheel --no-deps --wheel-dir "$work/dist" "$work/clone"
rm -rf "$work/clone"

step "$(basename "$work"/dist/*.whl)[node] in an empty environment"
"${pip[@]}" install "$(echo "$work"/dist/*.whl)[node]"

cd "$work"
step polarnode doctor
environment/bin/polarnode doctor --engine simulated
step "the README's first task"
environment/bin/polarnode run --engine simulated hello.toml
