"""A patch in git's own format, read as its files. Pure, and of bytes: names need not be text, and a form feed ends no line.

The rule for whoever edits it: a line that begins a file can stand nowhere else, since inside a hunk every line has a sign before it and
base85 has no spaces.
"""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

BEGINS = b"diff --git "
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(rb"\\([0-7]{3}|.)")
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


def sections(patch: bytes) -> Iterator[tuple[str | None, bytes]]:
    """Each file's path and its part of the patch; first, without a path, what stands before them all."""
    path: str | None = None
    lines: list[bytes] = []
    for line in _lines(patch):
        if line.startswith(BEGINS):
            if lines:
                yield path, b"".join(lines)
            path, lines = _path(line), []
        lines.append(line)
    if lines:
        yield path, b"".join(lines)


def paths(patch: bytes) -> tuple[str, ...]:
    """The files a patch touches, in its order."""
    return tuple(path for path, _ in sections(patch) if path is not None)


def without(patch: bytes, patterns: Sequence[str]) -> bytes:
    """The patch without the files whose path matches one of the patterns, where * matches / too, and without what is inside a .git."""
    kept = (section for path, section in sections(patch) if path is None or not _unwanted(path, patterns))
    return b"".join(kept)


def _unwanted(path: str, patterns: Sequence[str]) -> bool:
    return ".git" in path.split("/") or any(fnmatchcase(path, pattern) for pattern in patterns)


def _lines(patch: bytes) -> list[bytes]:
    """Lines by their line feeds alone: a carriage return is a file's own."""
    *whole, last = patch.split(b"\n")
    return [line + b"\n" for line in whole] + ([last] if last else [])


def _path(line: bytes) -> str:
    """The second name of `diff --git a/x b/x`. Bytes that are no UTF-8 become surrogates, as Python has them in file names."""
    names = line.rstrip(b"\r\n").removeprefix(BEGINS)
    quoted = _QUOTED.findall(names)
    if quoted:
        name = _unquoted(quoted[-1]) if names.endswith(b'"') else names.rpartition(b" ")[2]
    else:
        half = names[(len(names) + 1) // 2 :]  # both names are the same but for their a/ and b/, whatever spaces they hold
        name = half if half.startswith(b"b/") and names[: len(names) // 2][2:] == half[2:] else names.rpartition(b" ")[2]
    return name.removeprefix(b"b/").decode("utf-8", "surrogateescape")


def _unquoted(name: bytes) -> bytes:
    def plain(found: re.Match[bytes]) -> bytes:
        told = found[1]
        return bytes([int(told, 8) & 0xFF]) if len(told) == 3 else _LETTERS.get(told, told)

    return _ESCAPED.sub(plain, name)
