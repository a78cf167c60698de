"""User code named by import path: harnesses, evaluators, builders.

This is the only module that imports what a request names. Invariant: nothing is imported before the node's
settings allow its module, because importing runs code. It uses importlib alone: no file paths, no entry
points, no evaluation of text.
"""

from importlib import import_module
from typing import TypeVar

from polarnode.core.errors import Refused, boundary

EVERYTHING = "*"

T = TypeVar("T")


def load(import_path: str, *, allowed: tuple[str, ...]) -> object:
    """Return the object that `package.module:attribute` names. Raises Refused unless the module is, or lies
    below, one of `allowed` ("*" allows all).
    """
    module_name, attribute = _parts(import_path)
    if not any(_lies_below(module_name, prefix) for prefix in allowed):
        raise Refused(
            f"{module_name!r} may not be imported by this node: add it, or a package above it, to the node's"
            " import_paths (--allow-import)"
        )
    with boundary(Refused, f"importing {module_name!r} failed"):
        module = import_module(module_name)
    if not hasattr(module, attribute):
        raise Refused(f"module {module_name!r} has no attribute {attribute!r}: name one it has")
    found: object = getattr(module, attribute)
    return found


def load_value(import_path: str, kind: type[T], *, allowed: tuple[str, ...], path: str) -> T:
    """Load an object of type `kind`. Raises Refused, with the path of the field that named it, for any other
    object.
    """
    found = load(import_path, allowed=allowed)
    if not isinstance(found, kind):
        raise Refused(f"{import_path} is not a {kind.__module__}.{kind.__qualname__}", path=path)
    return found


def is_module(name: str) -> bool:
    """Whether this is the dotted name of a module or package."""
    return all(part.isidentifier() for part in name.split("."))


def _parts(import_path: str) -> tuple[str, str]:
    module_name, _, attribute = import_path.partition(":")
    if not attribute.isidentifier() or not is_module(module_name):
        raise Refused(f"{import_path!r} is not an import path: write it as package.module:attribute")
    return module_name, attribute


def _lies_below(module_name: str, prefix: str) -> bool:
    return prefix == EVERYTHING or module_name == prefix or module_name.startswith(f"{prefix}.")
