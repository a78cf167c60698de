"""The adapters of a node: their files below its state_dir, their versions in the log, and both after a
restart.

The files of a version are the node's own copy. They are written whole before the engine is told of them, so
that a restarted engine host or node has them whatever became of the trainer's. A version is in the log before
a token is sampled by it, and what is in the log is served: a node that is killed before that serves the
version before, and one that is killed after it serves the new one. A version that cannot be served again is
named in the status, and the tasks of its adapter are refused with the reason. Where nodes share a log,
`follow` takes what the others were sent.
"""

import logging
import os
import re
import shutil
from collections.abc import AsyncIterable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path
from typing import BinaryIO, Final
from uuid import uuid4

import trio
from attrs import define, evolve, field

from polarnode.core.codec.json import read_json
from polarnode.core.codec.tasks import ADAPTER
from polarnode.core.errors import (
    Busy,
    ConfigError,
    Conflict,
    DiskFull,
    EngineError,
    PolarnodeError,
    Refused,
    shortened,
)
from polarnode.core.weights import AdapterReport, AdaptersState, AdapterState
from polarnode.engine.checkpoints import (
    CONFIG,
    MAX_ADAPTER_HEADER_BYTES,
    MAX_CONFIG_BYTES,
    TENSORS,
    BadCheckpoint,
    head,
    open_regular,
)
from polarnode.engine.weight_copies import Copies
from polarnode.engine.weight_values import AdapterOrder, DiskSource, Served
from polarnode.engine.weights import Weights, read_served, served_json
from polarnode.journal.entries import is_deleted
from polarnode.journal.log.port import LogUnavailable, LogWeights
from polarnode.support.bounded import open_private

# A version is a part of a path on every disk and of a URL, and a name in the engine.
VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:~-]{0,127}")
# Bytes of an adapter: rank 64 of every linear layer of a 70B model is 1.7 GB in bfloat16, and twice that in
# float32.
MOST_BYTES: Final = 4 << 30
COPY_CHUNK_BYTES: Final = 16 << 20  # bytes between looks at the room on the disk: some 10 ms
SHOWN_CHARS: Final = 200  # characters of the base that an adapter names, in a sentence; a path has fewer
_log = logging.getLogger(__name__)
INCOMING_PREFIX: Final = ".incoming-"  # prefix of a folder that is not whole; no adapter's name begins so


@define(eq=False)
class AdapterStore:
    """The adapters of one node. One adapter is replaced at a time, and none while the base is updated. Call
    `restore` first. `reserve` is how many bytes of the disk are kept free; `rank` and `slots` are the
    settings.
    """

    weights: Weights
    folder: Path
    reserve: int
    rank: int = 0
    slots: int = 0
    _served: dict[str, Served] = field(factory=dict, init=False)
    _updates: int = field(default=0, init=False)
    _unable: set[str] = field(factory=set, init=False)  # versions of the log that cannot be served here

    def __attrs_post_init__(self) -> None:
        self.folder = self.folder.absolute()  # engine hosts work in folders of their own

    # ── new versions ──────────────────────────────────────────────────────────

    async def update(self, order: AdapterOrder) -> AdapterReport:
        """Serve an adapter from a folder. The same order again has the same answer. Raises Conflict for a
        version that names other weights. Raises Refused, DiskFull and EngineError with the version before
        still served.
        """
        source = Path(order.source.path)
        self._check(order.name, order.version)
        if not source.is_absolute() or "\0" in order.source.path:
            raise Refused("source.path must be an absolute path of this machine", path="$.source.path")
        with self._incoming(order.name) as folder:
            await trio.to_thread.run_sync(self._copy, source, folder)
            report = await self._serve(order.name, order.version, folder, {"path": str(source)})
        return await self._spread(report)

    async def serve_from_start(self, folders: Mapping[str, str], report: Callable[[str], None]) -> None:
        """Serve adapters that the settings name. Their versions are named after their content, so that a
        restart serves the same one. Later versions of a name stay. Raises ConfigError for what cannot be
        served.
        """
        for name, path in folders.items():
            digest = await trio.to_thread.run_sync(adapter_digest, Path(path))
            source = DiskSource(path=str(await trio.Path(path).absolute()))
            try:
                await self.update(
                    AdapterOrder(name=name, version=f"{name}-{digest[:12] or 'start'}", source=source)
                )
            except LogUnavailable:
                raise
            except Busy as error:  # it is served here, and the other nodes take it when they can
                report(f"adapters.{name}: {error}")
            except PolarnodeError as error:
                versions = self.weights.engines.adapters.versions(name)
                if not versions or not isinstance(error, Conflict):
                    raise ConfigError(f"adapters.{name}: {error}") from error
                report(f"adapter {name!r} stays at version {versions[-1]!r}, which came after {path}")

    async def receive(
        self, name: str, version: str, body: AsyncIterable[bytes], announced: int
    ) -> AdapterReport:
        """Serve an adapter that comes as the bytes of a safetensors file, whose metadata has PEFT's
        configuration as `adapter_config`. `announced` is the number of bytes to come, 0 where nobody says.
        """
        self._check(name, version)
        with self._incoming(name) as folder:
            await self._write(folder / TENSORS, body, announced)
            await trio.to_thread.run_sync(_unpack_config, folder)
            report = await self._serve(name, version, folder, {})
        return await self._spread(report)

    async def _spread(self, report: AdapterReport) -> AdapterReport:
        """The report, once the other nodes of the log serve the version too, or had the time to."""
        seconds = self.weights.spread_s + 2 * report.seconds
        await self.weights.spread(report.version, report.name, seconds=seconds)
        return evolve(report, stale=await self.weights.lacking(report.version, report.name))

    async def delete(self, name: str) -> AdapterState | None:
        """Forget an adapter, and its files. Raises Conflict while sessions sample by it. Returns None if it
        is unknown.
        """
        async with self.weights.alone():
            engine = self.weights.engines.adapters
            state = next((each for each in engine.status() if each.name == name), None)
            if state is None:
                return None
            engine.drop(name)
            served = self._served.pop(name)
            with trio.CancelScope(shield=True):  # bounded by WRITTEN_S
                gone = evolve(served, source={**served.source, "deleted": "true"})
                change, model = self.weights.log.change_weights, self.weights.name
                # If that fails the files are still there, and the next look at the log serves them again.
                await self.weights.written(partial(change, served.version, served_json(gone), model=model))
                await trio.to_thread.run_sync(_remove, self.folder / name)
                await self.weights.tell_serving()
            return evolve(state, loaded=False)

    def status(self) -> AdaptersState:
        return AdaptersState(
            adapters=self.weights.engines.adapters.status(),
            lora_rank=self.rank,
            lora_slots=self.slots,
            updates=self._updates,
        )

    # ── files ─────────────────────────────────────────────────────────────────

    def _check(self, name: str, version: str) -> None:
        """Raise for a name or version that cannot be taken, before anything is read or written."""
        self.weights.engines.adapters.require_enabled()
        if ADAPTER.fullmatch(name) is None:
            raise Refused(
                "name must be 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or digit",
                path="$.name",
            )
        if VERSION.fullmatch(version) is None:
            raise Refused(
                "version must be 1 to 128 letters, digits, '.', '_', ':', '~' or '-', and begin with a letter"
                " or digit",
                path="$.version",
            )

    @contextmanager
    def _incoming(self, name: str) -> Iterator[Path]:
        """A folder for files that are not served yet. What is left of it after the block is removed."""
        folder = self.folder / f"{INCOMING_PREFIX}{name}-{uuid4().hex}"
        folder.mkdir(parents=True, mode=0o700)
        try:
            yield folder
        finally:
            _remove(folder)

    def _copy(self, source: Path, folder: Path) -> None:
        for name, most in ((CONFIG, MAX_CONFIG_BYTES), (TENSORS, MOST_BYTES)):
            try:
                with open_regular(source / name) as file:
                    self._copy_file(file, folder / name, most)
            except BadCheckpoint as error:
                raise Refused(str(error), path="$.source.path") from None
            except OSError as error:
                raise Refused(
                    f"{source / name} cannot be read ({error.strerror}): name a folder of this machine that"
                    " PEFT's save_pretrained wrote, with safetensors",
                    path="$.source.path",
                ) from None

    def _copy_file(self, file: BinaryIO, to: Path, most: int) -> None:
        """Copy what is there, at most `most` bytes, because the size may be another than the file's metadata
        claims.
        """
        announced, size = os.fstat(file.fileno()).st_size, 0
        _require_size(to.name, announced, most)
        self._require_room(announced)
        with open(to, "wb", opener=open_private) as copy:
            while data := file.read(COPY_CHUNK_BYTES):
                self._require_room(max(len(data), announced - size))
                size += len(data)
                _require_size(to.name, size, most)
                copy.write(data)

    async def _write(self, path: Path, body: AsyncIterable[bytes], announced: int) -> None:
        _require_size(TENSORS, announced, MOST_BYTES)
        size = 0
        async with await trio.open_file(path, "wb", opener=open_private) as file:
            async for data in body:
                self._require_room(max(len(data), announced - size))
                size += len(data)
                _require_size(TENSORS, size, MOST_BYTES)
                await file.write(data)

    def _require_room(self, size: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free - size < self.reserve:
            raise DiskFull(
                f"{free >> 20} MiB are free for {size >> 20} MiB of an adapter, and {self.reserve >> 20} MiB"
                " stay free (disk_reserve_mb): free some, or delete adapters that no run uses"
            )

    # ── serving ───────────────────────────────────────────────────────────────

    async def _serve(self, name: str, version: str, folder: Path, source: dict[str, str]) -> AdapterReport:
        began = trio.current_time()
        digest = await trio.to_thread.run_sync(adapter_digest, folder)
        async with self.weights.alone():
            if (again := await self._again(name, version, digest)) is not None:
                await self.weights.settle(version, name)
                return again
            self.weights.require_free()
            base = self.weights.engines.versions[-1]
            await self._require_same_base(base, folder)
            served = Served(
                version=version,
                mode="in_place",
                source={"kind": "adapter", "adapter": name, "base": base, **source},
                seconds=0.0,
                hosts=(),
                digest=digest,
                model=self.weights.model,
            )
            with trio.CancelScope(shield=True):  # bounded by the engine's own bounds, and WRITTEN_S
                place = self.folder / name / version
                await trio.to_thread.run_sync(_place, folder, place)
                try:
                    # The version is loaded, then written down, then sampled by.
                    write = partial(self._record_served, served, began)
                    await self.weights.engines.adapters.put(name, version, place, loaded=write)
                except BaseException:
                    _remove(place)
                    with suppress(OSError):
                        place.parent.rmdir()  # if the adapter has no other version
                    raise
                await self._prune(name)
                await self.weights.settle(version, name)
            self._updates += 1
            return _report(self._served[name], created=True)

    async def _require_same_base(self, version: str, folder: Path) -> None:
        """Raise Conflict if the weights that are served are not those that an adapter was trained on, because
        it would sample from a policy that nobody trains. The node's own checkpoint has many names, and is
        recognised by not being any other weights. The weights of an update are recognised by their version or
        their folder.
        """
        updates = await self.weights.history()
        named = await trio.to_thread.run_sync(_mismatched_base, folder, updates, version, self.weights.model)
        if named is not None:
            base = shortened(named, SHOWN_CHARS) or "a base that it does not name"
            raise Conflict(
                f"this adapter was trained on {base}, and the node serves the weights {version!r}: serve its"
                " base first (POST /v1/weights), or train it on what is served and put that version into"
                " base_model_name_or_path of its configuration"
            )

    async def _record_served(self, served: Served, began: float) -> None:
        served = evolve(served, seconds=trio.current_time() - began)
        await self.weights.write_down(served)
        self._served[served.source["adapter"]] = served

    async def _again(self, name: str, version: str, digest: str) -> AdapterReport | None:
        """The report of a version that is served already. None for a new version, or one that this node
        served last and could not bring back. Raises Conflict for a version that names other weights.
        """
        row = await self.weights.log.weights_of(version, model=self.weights.name)
        if row is None:
            if version in self.weights.engines.versions:
                raise Conflict(
                    f"version {version!r} is that of the base weights: give the adapter's one of its own"
                )
            return None
        recorded = read_served(row)
        if row.adapter != name or recorded.digest != digest or "deleted" in recorded.source:
            raise Conflict(f"version {version!r} named other weights: give these a version of their own")
        if (current := self._served.get(name)) is not None and current.version == version:
            return None if self._is_lost(name) else _report(recorded, created=False)
        # Another node of the log was sent this version.
        if current is None and (row.current or not row.counted):
            return None
        raise Conflict(
            f"version {version!r} of adapter {name!r} was served before and another is now: give these"
            " weights a version of their own"
        )

    async def _prune(self, name: str) -> None:
        """Remove the files of versions that no engine host could be asked to load again."""
        engine = self.weights.engines.adapters
        wanted = {*engine.kept, *engine.versions(name)[-1:]}

        def prune() -> None:
            for each in (self.folder / name).iterdir():
                if each.name not in wanted:
                    _remove(each)

        await trio.to_thread.run_sync(prune)

    # ── what other nodes of the log were sent ─────────────────────────────────

    async def forget_deleted(self) -> None:
        """Drop what was deleted at another node. Sessions that sample by it here end first."""
        for row in await self._rows():
            here = self._served.get(row.adapter)
            if is_deleted(row.body) and here is not None and here.version == row.version:
                async with self.weights.alone():
                    with suppress(Conflict):
                        self.weights.engines.adapters.drop(row.adapter)
                        del self._served[row.adapter]
                        await trio.to_thread.run_sync(_remove, self.folder / row.adapter)

    async def follow(self, copies: Copies) -> None:
        """Serve the versions of the log that count. What cannot be done now is tried at the next look."""
        for row in await self._rows():
            here = self._served.get(row.adapter)
            if is_deleted(row.body):
                continue
            if here is not None and here.version == row.version and not self._is_lost(row.adapter):
                if self.weights.incarnation not in row.holders or not row.current:
                    await self.weights.settle(row.version, row.adapter)
            elif row.current or not row.counted:
                await self._take(read_served(row), row, copies)

    async def _rows(self) -> list[LogWeights]:
        """The newest version of each adapter and the one that counts. The one that counts comes last, so that
        it is served in the end.
        """
        weights = self.weights
        rows = await weights.log.weights(model=weights.name, adapters=True, latest=True)
        return sorted(rows, key=lambda each: each.current)

    async def folder_of(self, version: str) -> Path | None:
        """The unchanged files of a version of an adapter, if this node has them."""
        row = await self.weights.log.weights_of(version, model=self.weights.name)
        if row is None or not row.adapter:
            return None
        place = self.folder / row.adapter / version
        whole = await trio.to_thread.run_sync(adapter_digest, place) == read_served(row).digest
        return place if whole else None

    def _is_lost(self, name: str) -> bool:
        return name in self.weights.engines.adapters.lost

    async def _take(self, served: Served, row: LogWeights, copies: Copies) -> None:
        """Get the files of a version, say that this node has them, and serve the version if it counts."""
        weights, name = self.weights, row.adapter
        base = weights.engines.versions[-1]
        if served.source["base"] != base or row.version in self._unable:
            return
        try:
            weights.engines.adapters.require_enabled()
        except Conflict as refused:
            self._note_unable(name, row.version, str(refused))
            return
        place = self.folder / name / row.version
        if await trio.to_thread.run_sync(adapter_digest, place) != served.digest:
            with self._incoming(name) as folder:
                if not await copies.copy(row, folder):
                    return
                if await trio.to_thread.run_sync(adapter_digest, folder) != served.digest:
                    _log.error(
                        "the copy of version %s of adapter %s is not what the log names", row.version, name
                    )
                    return
                await trio.to_thread.run_sync(_place, folder, place)
        await weights.log.add_weight_holder(row.version, weights.incarnation, model=weights.name)
        if not row.current and not await weights.count_version(row.version, name):
            return
        async with weights.alone():
            try:
                weights.require_free()
                await weights.engines.adapters.put(name, row.version, place)
            except Conflict:  # the base is being updated, or its memory is lent
                return
            except (EngineError, Refused) as error:
                self._note_unable(name, row.version, str(error))
                return
            self._served[name] = served
            self._updates += 1
            await self._prune(name)
        _log.info("version %s of adapter %s of the log is served", row.version, name)

    def _note_unable(self, name: str, version: str, why: str) -> None:
        """Note that a version cannot be served here: this node takes no task that needs it, and nobody waits
        for the node.
        """
        self._unable.add(version)
        self.weights.unable.add(name)
        _log.error("version %s of adapter %s of the log cannot be served here: %s", version, name, why)

    # ── after a restart ───────────────────────────────────────────────────────

    async def restore(self, report: Callable[[str], None]) -> None:
        """Serve each adapter's last version again, and `report` what was not whole or cannot be served."""
        found = await self.weights.log.weights(model=self.weights.name, adapters=True)
        rows = [read_served(row) for row in found if row.counted]
        last: dict[str, Served] = {}
        for served in rows:
            last.setdefault(served.source["adapter"], served)
        wanted = {name: served for name, served in last.items() if "deleted" not in served.source}
        for name in await trio.to_thread.run_sync(
            _sweep_folders,
            self.folder,
            {(each.source["adapter"], each.version) for each in rows},
            wanted.keys(),
        ):
            report(
                f"a version of adapter {name!r} was not served yet when the node ended, and its files are"
                " removed: send it again"
            )
        engine = self.weights.engines.adapters
        for name, served in wanted.items():
            self._served[name] = served
            why = await self._why_not(name, served)
            if why is None:
                report(f"serving version {served.version!r} of adapter {name!r}")
                await self._prune(name)
            else:
                engine.lost[name] = (
                    f"adapter {name!r} is not served: its last version, {served.version!r}, {why}; send it"
                    " again, or another version"
                )
                report(engine.lost[name])

    async def _why_not(self, name: str, served: Served) -> str | None:
        """Serve a version again. Returns why it cannot be served, or None when it is served now."""
        base, folder = self.weights.engines.versions[-1], self.folder / name / served.version
        if served.model != self.weights.model and not self.weights.log.shared:
            return f"is of another model, {served.model}"
        if served.source["base"] != base:
            return f"is of the base weights {served.source['base']!r}, and {base!r} are served"
        if not await trio.Path(folder).is_dir():
            return f"has no files any more: {folder} is gone"
        if await trio.to_thread.run_sync(adapter_digest, folder) != served.digest:
            return f"has damaged files: those in {folder} have changed"
        try:
            await self.weights.engines.adapters.put(name, served.version, folder)
        except (Conflict, EngineError, Refused) as error:
            return f"cannot be loaded: {error}"
        return None


def _report(served: Served, *, created: bool) -> AdapterReport:
    return AdapterReport(
        name=served.source["adapter"],
        version=served.version,
        source=served.source,
        seconds=served.seconds,
        created=created,
    )


# ── folders; each of these runs in a thread ───────────────────────────────────


def _require_size(name: str, size: int, most: int) -> None:
    if size > most:
        raise Refused(f"{name} has {size} bytes, and at most {most} are taken: is it an adapter?")


def _unpack_config(folder: Path) -> None:
    """Write the configuration that the file of tensors carries."""
    try:
        found = head(folder / TENSORS, MAX_ADAPTER_HEADER_BYTES).get("__metadata__", {}).get("adapter_config")
    except (BadCheckpoint, AttributeError, KeyError, TypeError, IndexError) as error:
        raise Refused(f"the body is no safetensors file: {error}") from None
    if not isinstance(found, str):
        raise Refused(
            "the body's __metadata__ has no adapter_config: put PEFT's adapter_config.json there, as text"
        )
    _require_size("adapter_config", len(found), MAX_CONFIG_BYTES)
    (folder / CONFIG).write_text(found)


def _named_base(folder: Path) -> str:
    """The base that an adapter names. It is empty if the adapter names none."""
    try:
        found = read_json((folder / CONFIG).read_bytes())
    except (OSError, Refused):
        return ""  # the fault is reported when the adapter is loaded
    named = found.get("base_model_name_or_path") if isinstance(found, dict) else None
    return named if isinstance(named, str) else ""


def _mismatched_base(folder: Path, updates: Sequence[Served], version: str, model: str) -> str | None:
    """The base that an adapter names, if it is not the one that is served. It is empty if the adapter names
    none. None if it may be the served one. `updates` are the node's, newest first, and `model` is its own
    checkpoint.
    """
    named = _named_base(folder)
    current = next((each for each in updates if each.version == version), None)
    if current is not None and _real_path(current.source.get("path")) != _real_path(model):
        is_it = bool(named) and (
            named == version or _real_path(named) == _real_path(current.source.get("path"))
        )
        return None if is_it else named
    others = (each for each in updates if _real_path(each.source.get("path")) != _real_path(model))
    known = any(
        named == each.version or _real_path(named) == _real_path(each.source.get("path")) for each in others
    )
    return named if named and known else None


def _real_path(path: str | None) -> str:
    """The folder that a path leads to, or the text itself if it is no path."""
    return os.path.realpath(path) if path and "\0" not in path else path or ""


def adapter_digest(folder: Path) -> str:
    """The digest of the content of both files. It is empty if one is missing."""
    whole = sha256()
    for name in (CONFIG, TENSORS):
        try:
            with open_regular(folder / name) as file:
                whole.update(file_digest(file, "sha256").digest())
        except (OSError, BadCheckpoint):
            return ""
    return whole.hexdigest()


def _place(folder: Path, place: Path) -> None:
    """Move whole files to their place. All of it is on the disk when this returns."""
    place.parent.mkdir(exist_ok=True, mode=0o700)
    _remove(place)  # left by a version that could not be served again
    folder.rename(place)
    for each in (*place.iterdir(), place, place.parent, place.parent.parent):
        _sync_path(each)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _sweep_folders(folder: Path, known: Collection[tuple[str, str]], names: Collection[str]) -> list[str]:
    """Remove what was not served yet when the node ended, and adapters that are none of `names`, which were
    deleted. Returns the adapters of the former.
    """
    folder.mkdir(exist_ok=True, mode=0o700)
    found = {
        each: each.name.removeprefix(INCOMING_PREFIX).rpartition("-")[0]
        for each in folder.glob(f"{INCOMING_PREFIX}*")
    }
    for each in folder.glob("[!.]*/*"):
        if (each.parent.name, each.name) not in known:
            found[each] = each.parent.name
    for each in (*found, *(each for each in folder.iterdir() if each.name not in names)):
        _remove(each)
    return sorted(found.values())
