#!/usr/bin/env bash
# All checks: format, lint, types, import contracts, tests with coverage. CI runs the same.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin

step() { printf '\n── %s\n' "$*"; }

step format and lint
$bin/ruff format --check .
$bin/ruff check .
# flake8-async takes files, not folders, and some 40 s of CPU for each hundred: only those where something can wait. ASYNC124 requires an async
# function to await, which an evaluator need not; ASYNC127 forbids httpx, which the official SDKs in our tests use.
git grep -lzwE 'async|trio|anyio|asyncio' -- '*.py' | xargs -0 -P 2 -n 100 $bin/flake8-async --disable ASYNC9,ASYNC124,ASYNC127 --startable-in-context-manager stop_on_signals,hold,started,follow
step types
$bin/mypy
step import contracts
$bin/lint-imports
step tests
coverage=$(mktemp -d)
trap 'rm -rf "$coverage"' EXIT
tests() { # FILE PYTEST_ARGUMENT…
  $bin/python -m slipcover --immediate --source polarnode --json --out "$coverage/$1" -m pytest "${@:2}"
}
if [ $# -gt 0 ]; then
  tests all.json "$@"
else
  # Two halves side by side: most tests of the first wait for engines, containers and processes. The second's output is printed after the first's.
  first=(tests/live tests/hostile tests/recovery tests/containers tests/fleet)
  tests second.json "${first[@]/#/--ignore=}" >"$coverage/second" 2>&1 &
  pid=$!
  trap 'kill $pid 2>/dev/null || true; rm -rf "$coverage"' EXIT
  failed=0
  tests first.json "${first[@]}" || failed=1
  wait $pid || failed=1
  cat "$coverage/second"
  [ $failed = 0 ] || exit 1
fi
$bin/python -m slipcover --merge "$coverage"/*.json --out "$coverage/merged" --skip-covered --fail-under 80
