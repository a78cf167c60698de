"""The pure parts of the `swebench` package: its specs, parsers and grader, without what surrounds them.

Importing `swebench.harness` imports docker, datasets and modal, which takes seconds and reads a .env file into the node's environment; the
parts that judge need none of it. The rule for whoever edits it: they are imported once, with nothing in the place of their neighbours, and
whatever stood in sys.modules stands there again afterwards. Another version is refused, since these parts are no public interface.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module, metadata, util
from types import ModuleType
from typing import Any, Final

from attrs import frozen

from polarnode.errors import Refused

VERSION = "5.0.2"
INSTALL = f"pip install --no-deps swebench=={VERSION} unidiff"
PACKAGES: Final = ("swebench", "swebench.harness")  # whose __init__ imports the rest
ABSENT: Final = ("datasets", "dotenv")  # imported by swebench.harness.utils, for what we do not call
Parser = Callable[[str, Any], Mapping[str, str]]


@frozen(kw_only=True)
class Package:
    """What the evaluator asks of it."""

    parsers: Mapping[str, Parser]
    make_test_spec: Callable[[dict[str, Any]], Any]
    get_eval_report: Callable[..., dict[str, Any]]
    test_spec: Callable[..., Any]
    start: str
    end: str
    exit_code: str


def load() -> Package:
    """The package's parts, or how to install them."""
    try:
        found = metadata.version("swebench")
    except metadata.PackageNotFoundError:
        raise Refused(f"the swebench evaluator needs the swebench package on the node: {INSTALL}", path="$.evaluator.name") from None
    if found != VERSION:
        raise Refused(f"the swebench evaluator needs swebench {VERSION} and the node has {found}: {INSTALL}", path="$.evaluator.name")
    return _load()


@cache
def _load() -> Package:
    with _alone():
        constants = import_module("swebench.harness.constants")
        grading = import_module("swebench.harness.grading")
        utils = import_module("swebench.harness.utils")
        types = import_module("swebench.types")
    return Package(
        parsers=grading.PARSER_REGISTRY,
        make_test_spec=utils.make_test_spec,
        get_eval_report=grading.get_eval_report,
        test_spec=types.TestSpec,
        start=constants.START_TEST_OUTPUT,
        end=constants.END_TEST_OUTPUT,
        exit_code=constants.TEST_EXIT_CODE,
    )


@contextmanager
def _alone() -> Iterator[None]:
    """While it lasts, these packages have no __init__ and their neighbours are empty; then everything is as it was."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _concerned(name)}
    try:
        sys.modules.update({name: _package(name) for name in PACKAGES})
        sys.modules.update({name: _Nothing(name) for name in ABSENT})
        yield
    finally:
        for name in [name for name in sys.modules if _concerned(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _concerned(name: str) -> bool:
    return name.partition(".")[0] in ("swebench", *ABSENT)


def _package(name: str) -> ModuleType:
    """A package without its __init__: only where its modules lie."""
    top = util.find_spec(name.partition(".")[0])
    if top is None or not top.submodule_search_locations:
        raise Refused(f"the swebench package can not be read: {INSTALL}", path="$.evaluator.name")
    module = ModuleType(name)
    module.__path__ = [f"{top.submodule_search_locations[0]}/{'/'.join(name.split('.')[1:])}".rstrip("/")]
    return module


class _Nothing(ModuleType):
    """A module all of whose names are functions that do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*arguments: object, **named: object) -> None:
    return None
