"""Rows of a dataset on disk: Parquet, Arrow (as `save_to_disk` writes it), JSON, JSONL; one file or splits.

Rows are read one at a time, whatever the size of the file. Splits are never mixed: with several, one must be
named. pyarrow is imported only for files that need it.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from attrs import frozen

from polarnode.core.conversation import Json
from polarnode.core.errors import ConfigError, Refused
from polarnode.sources.reading import lines, named, read_json, read_line

PYARROW = "26.0.1"
FORMATS = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json")
BATCH = 64  # rows read at once: a row of SWE-bench is some 20 kB of text
# what datasets writes beside its data
OWN_FILES = ("dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json")


@frozen(kw_only=True)
class DatasetRow:
    """A row and its origin (file and number, from 1), or why it cannot be read."""

    origin: str
    value: Mapping[str, Json] | None = None
    refused: Refused | None = None


def is_dataset(folder: Path) -> bool:
    """Whether a folder looks like a dataset on disk."""
    return any((folder / name).is_file() for name in OWN_FILES) or bool(_data_files(folder))


def rows(path: Path, *, split: str | None) -> Iterator[DatasetRow]:
    """The rows of a file or of a folder's one split. Refused when there are several and none is named."""
    files = [path] if path.is_file() else _files_of(path, split)
    for file in files:
        yield from _rows_of(file)


# ── files ──────────────────────────────────────────────────────────────────────


def _files_of(folder: Path, split: str | None) -> Sequence[Path]:
    splits = _splits(folder)
    if not splits:
        raise Refused(f"{folder} holds no data: no file of it ends in {', '.join(FORMATS)}")
    if split is None and len(splits) > 1:
        raise Refused(f"{folder} has several splits ({', '.join(sorted(splits))}): name one with --split")
    chosen = next(iter(splits)) if split is None else split
    if chosen not in splits:
        raise Refused(f"{folder} has no split {chosen}: there are {', '.join(sorted(splits))}")
    return splits[chosen]


def _splits(folder: Path) -> Mapping[str, Sequence[Path]]:
    """Data files by split: a folder each (DatasetDict), or the beginning of a file's name
    (`test-00000-of-00001.parquet`).
    """
    found: dict[str, list[Path]] = {}
    for file in _data_files(folder):
        owner = file.parent
        own = (owner / "state.json").is_file() or (owner / "dataset_info.json").is_file()
        of_dict = own and owner != folder
        name = owner.name if of_dict else "data" if own else file.name.split("-")[0].removesuffix(file.suffix)
        found.setdefault(name, []).append(file)
    return found


def _data_files(folder: Path) -> list[Path]:
    """Data files of a folder: its own, those of its `data/`, those of one folder a split."""
    return sorted(file for level in ("*", "*/*") for file in folder.glob(level) if _is_data(file))


def _is_data(file: Path) -> bool:
    return (
        file.suffix in FORMATS
        and file.name not in OWN_FILES
        and not file.name.startswith((".", "cache-"))
        and file.is_file()
    )


# ── rows ───────────────────────────────────────────────────────────────────────


def _rows_of(file: Path) -> Iterator[DatasetRow]:
    match file.suffix:
        case ".jsonl" | ".ndjson":
            yield from _lines_of(file)
        case ".json":
            value = read_json(file)
            for number, each in enumerate(value if isinstance(value, list) else [value], start=1):
                yield _row(each, f"{file} row {number}")
        case _:
            batches = _parquet(file) if file.suffix == ".parquet" else _arrow(file)
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
                yield DatasetRow(origin=f"{file} row {number}", value=cast(Mapping[str, Json], row))


def _lines_of(file: Path) -> Iterator[DatasetRow]:
    for number, line in lines(file):
        origin = f"{file} line {number}"
        try:
            yield _row(read_line(line), origin)
        except Refused as refused:
            yield DatasetRow(origin=origin, refused=named(refused, origin))


def _row(value: Json, origin: str) -> DatasetRow:
    if isinstance(value, dict):
        return DatasetRow(origin=origin, value=value)
    return DatasetRow(
        origin=origin, refused=Refused(f"{origin}: a row is a JSON object, not {type(value).__name__}")
    )


def _parquet(file: Path) -> Iterator[Any]:
    pyarrow = _pyarrow(file)
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            yield from opened.iter_batches(batch_size=BATCH)
    except (OSError, pyarrow.ArrowException) as error:
        raise Refused(f"{file} cannot be read as Parquet: {error}") from error


def _arrow(file: Path) -> Iterator[Any]:
    """Arrow's stream format, which `datasets` writes, or its file format."""
    pyarrow = _pyarrow(file)
    try:
        with pyarrow.memory_map(str(file)) as opened:
            try:
                reader: Any = pyarrow.ipc.open_stream(opened)
                yield from reader
            except pyarrow.ArrowInvalid:
                opened.seek(0)
                whole = pyarrow.ipc.open_file(opened)
                yield from (whole.get_batch(index) for index in range(whole.num_record_batches))
    except (OSError, pyarrow.ArrowException) as error:
        raise Refused(f"{file} cannot be read as Arrow: {error}") from error


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(
            f"{file}: reading {file.suffix} needs pyarrow: pip install pyarrow=={PYARROW}"
        ) from error
    return pyarrow
