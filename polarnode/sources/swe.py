"""Datasets like SWE-bench and SWE-Gym: a row is a repository at a commit, a problem, and its tests.

Invariant: what solves or judges the problem (`patch`, `test_patch`, names of tests, hints) goes to the
evaluator only, never to the instruction, runtime, harness or metadata, where a container could see it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.sources.reading import DatasetRow, named, rows
from polarnode.sources.values import FoundTask, Overrides, UnreadTask

WORKDIR = "/testbed"
# The seconds of POST. The suite of the slowest repository runs for half an hour, after its image is started
# and the patch applied.
POST_S = 2400.0
RUN_S = 3600.0  # the seconds of an agent, as in the published offline run of these tasks
MEMORY_MB = 8192  # the larger test suites (sympy, pandas, dask) do not run in two gigabytes
CPUS = 2.0
# The repository's own Python comes first, as in the images' login shells. A harness's commands run in no
# login shell.
PATH = (
    "/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin"
    ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
# The history in the images contains the solution, beyond the base commit. This script removes every name of
# it, and with them every way to find it by looking. Tags of earlier commits stay, because packages read their
# version from them.
CUT = f"""\
repo() {{ git -c safe.directory='*' -C {WORKDIR} "$@"; }}
repo remote | while read -r name; do repo remote remove "$name"; done
repo for-each-ref --format='%(refname)' --no-merged=HEAD |
    while read -r name; do repo update-ref -d "$name"; done
repo for-each-ref --format='%(objecttype)%(*objecttype) %(refname)' | grep -vE '^(commit|tagcommit) ' |
    while read -r _ name; do repo update-ref -d "$name"; done
cd "$(repo rev-parse --absolute-git-dir)" && rm -rf ORIG_HEAD FETCH_HEAD COMMIT_EDITMSG MERGE_MSG logs
repo gc --quiet --prune=now
"""
PIDS = 1024  # processes, enough for a parallel test run beside the harness
INSTRUCTION = """\
You are working in a checkout of the repository {repo}, in {workdir}. \
Solve the following issue by changing files there. \
Do not change tests that exist; the solution is judged by tests that you do not see.

<issue>
{problem_statement}
</issue>
"""
SWEBENCH_IMAGE_TEMPLATE = "swebench/sweb.eval.x86_64.{id_1776}:latest"
SWEGYM_IMAGE_TEMPLATE = "xingyaoww/sweb.eval.x86_64.{id_s}:latest"
# The repositories of each dataset, by which the image name is chosen. A repository in neither needs an image
# column or --image-template.
SWEBENCH_REPOS = frozenset(
    [
        "astropy/astropy",
        "django/django",
        "matplotlib/matplotlib",
        "mwaskom/seaborn",
        "pallets/flask",
        "psf/requests",
        "pydata/xarray",
        "pylint-dev/pylint",
        "pytest-dev/pytest",
        "scikit-learn/scikit-learn",
        "sphinx-doc/sphinx",
        "sympy/sympy",
    ]
)
SWEGYM_REPOS = frozenset(
    [
        "getmoto/moto",
        "python/mypy",
        "conan-io/conan",
        "pydantic/pydantic",
        "iterative/dvc",
        "pandas-dev/pandas",
        "dask/dask",
        "project-monai/monai",
        "facebookresearch/hydra",
        "bokeh/bokeh",
        "modin-project/modin",
    ]
)
IMAGE_COLUMNS = ("image_name", "docker_image", "image")
REQUIRED_COLUMNS = (
    "instance_id",
    "repo",
    "base_commit",
    "problem_statement",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
)
EVALUATOR_COLUMNS = (
    *(
        "instance_id",
        "repo",
        "base_commit",
        "test_patch",
        "FAIL_TO_PASS",
        "PASS_TO_PASS",
        "version",
        "environment_setup_commit",
    ),
    *("image", "eval_script", "log_parser", "eval_type", "image_assets"),  # columns of swebench 5
)
SHOWN = ("instance_id", "repo", "base_commit", "version")
# The solution, hints to it, and columns that do not concern an agent.
LEFT_OUT = ("patch", "hints_text", "created_at", "dockerfile", "difficulty")
PLACEHOLDER = re.compile(r"\{(\w+)\}")


def tasks(path: Path, overrides: Overrides) -> Iterator[FoundTask | UnreadTask]:
    """The task of each row."""
    for row in rows(path, split=overrides.split):
        yield _item(row, overrides)


def _item(row: DatasetRow, overrides: Overrides) -> FoundTask | UnreadTask:
    if row.value is None:
        return UnreadTask(
            name=row.origin, origin=row.origin, refused=row.refused or Refused(f"{row.origin} holds nothing")
        )
    instance_id = row.value.get("instance_id")
    name = instance_id if isinstance(instance_id, str) else row.origin
    origin = f"{row.origin} ({name})" if isinstance(instance_id, str) else row.origin
    try:
        return _task(row.value, name, origin, overrides)
    except Refused as refused:
        return UnreadTask(name=name, origin=origin, refused=named(refused, origin))


def _task(row: Mapping[str, Json], name: str, origin: str, overrides: Overrides) -> FoundTask:
    for column in REQUIRED_COLUMNS:
        if row.get(column) is None:
            raise Refused(
                f"the column {column} is missing: rows are of the shape of SWE-bench or SWE-Gym",
                path=f"$.{column}",
            )
    words = _words(row)
    value: dict[str, Json] = {
        "instruction": _filled(overrides.instruction_template or INSTRUCTION, words, "$.instruction"),
        "runtime": {
            "image": _image(row, words, overrides),
            "workdir": WORKDIR,
            # In all of these images everything belongs to root, the repository too. In a container without
            # capabilities root is an ordinary user.
            "user": "root",
            "read_only": False,
            "env": {"PATH": PATH},
            "prepare": [{"argv": ["sh", "-ec", CUT]}],
            "cpus": CPUS,
            "memory_mb": MEMORY_MB,
            "pids": PIDS,
        },
        "evaluator": {"name": "swebench", "config": {"instance": instance_value(row)}},
        "budgets": {"run_s": RUN_S, "post_s": POST_S},
        "metadata": {
            "source": "swe",
            **{column: row[column] for column in SHOWN if row.get(column) is not None},
        },
    }
    return FoundTask(name=name, origin=origin, value=value, notes=tuple(_notes(row)), foreign=True)


def _words(row: Mapping[str, Json]) -> dict[str, str]:
    """The values that a template may use. None is of the solution or its tests."""
    name = str(row["instance_id"])
    return {
        "instance_id": name,
        "id": name.lower(),
        "id_1776": name.lower().replace("__", "_1776_"),
        "id_s": name.lower().replace("__", "_s_"),
        "repo": str(row["repo"]),
        "base_commit": str(row["base_commit"]),
        "version": str(row.get("version") or ""),
        "problem_statement": str(row["problem_statement"]),
        "workdir": WORKDIR,
    }


def _filled(template: str, words: Mapping[str, str], path: str) -> str:
    """Fill a template once. Inserted text is not expanded again."""

    def word(found: re.Match[str]) -> str:
        if found[1] not in words:
            raise Refused(f"the template names {found[0]}, which is none of {', '.join(words)}", path=path)
        return words[found[1]]

    return PLACEHOLDER.sub(word, template)


def _image(row: Mapping[str, Json], words: Mapping[str, str], overrides: Overrides) -> str:
    """The image, by the user's template, the row's own column, or the convention of the dataset to which its
    repository belongs.
    """
    if overrides.image_template is not None:
        return _filled(overrides.image_template, words, "$.runtime.image")
    for column in IMAGE_COLUMNS:
        value = row.get(column)
        if isinstance(value, str) and value:
            return value
    repo = words["repo"].lower()
    if repo in SWEBENCH_REPOS:
        return _filled(SWEBENCH_IMAGE_TEMPLATE, words, "$.runtime.image")
    if repo in SWEGYM_REPOS:
        return _filled(SWEGYM_IMAGE_TEMPLATE, words, "$.runtime.image")
    how = "--image-template 'name/{id}:latest'"
    raise Refused(
        f"it has no column {', '.join(IMAGE_COLUMNS)}, and no convention is known for {words['repo']}: say"
        f" {how}",
        path="$.runtime.image",
    )


def instance_value(row: Mapping[str, Json]) -> dict[str, Json]:
    """The values by which the evaluator judges. Lists of tests, which some datasets write as JSON text,
    become lists.
    """
    found: dict[str, Json] = {
        column: row[column] for column in EVALUATOR_COLUMNS if row.get(column) is not None
    }
    return {**found, **{column: _tests(row[column], column) for column in ("FAIL_TO_PASS", "PASS_TO_PASS")}}


def _tests(value: Json, column: str) -> Json:
    found: Any = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            raise Refused(
                f"the column {column} is text, and no JSON list: {value[:60]!r}", path=f"$.{column}"
            ) from None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise Refused(f"the column {column} is no list of names of tests", path=f"$.{column}")
    return list(found)


def _notes(row: Mapping[str, Json]) -> Iterator[str]:
    columns = {*REQUIRED_COLUMNS, *EVALUATOR_COLUMNS, *IMAGE_COLUMNS, *LEFT_OUT}
    if row.get("hints_text"):
        yield "hints_text is not used: the agent gets the problem alone"
    for column in sorted(set(row) - columns):
        if row[column] not in (None, "", []):
            yield f"the column {column} is not used: it has no meaning here"
