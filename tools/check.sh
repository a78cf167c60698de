#!/usr/bin/env bash
# Everything that must hold: format, lint, types, floors, tests with coverage. The same here and in CI.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin

step() { printf '\n── %s\n' "$*"; }

step format and lint
$bin/ruff format --check .
$bin/ruff check .
$bin/flake8-async polarnode tests examples
step types
$bin/mypy
step floors
$bin/lint-imports
step tests
rm -f .coverage .coverage.*
$bin/coverage run -m pytest "$@"
$bin/coverage combine --quiet
$bin/coverage report --fail-under=85
