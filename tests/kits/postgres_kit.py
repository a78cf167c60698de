"""A PostgreSQL of a test's own: the distribution's programs, a cluster in a temporary folder, a user without root.

It writes to disk as in production (fsync is on), can be crashed, stopped, restarted and given a standby that is
promoted. A database of its own for each test is a copy of one that was migrated once.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
from attrs import define, field

from polarnode.journal.log.postgres.connection import open_database
from polarnode.journal.log.postgres.migrations import Migration, migrate, read_migrations

UID = 65534  # nobody: initdb refuses root
WAIT_S = 60  # for a start or a stop; two seconds on a quiet machine


def find_programs() -> Path:
    """The folder of the newest PostgreSQL of the distribution."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda each: int(each.parent.name))
    if not folders:
        raise RuntimeError("no PostgreSQL: apt-get install postgresql (tools/setup.sh test does)")
    return folders[-1]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@define(eq=False)
class Cluster:
    """A server. `folder` is its user's own."""

    folder: Path
    port: int
    _numbers: "count[int]" = field(factory=count)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def dsn(self, database: str = "postgres", user: str = "postgres", *, tcp: bool = False) -> str:
        host = "127.0.0.1" if tcp else self.folder
        return f"host={host} port={self.port} user={user} dbname={database}"

    def dsn_with(self, standby: "Cluster", database: str) -> str:
        """The DSN of whichever of the two takes writes."""
        hosts, ports = f"{self.folder},{standby.folder}", f"{self.port},{standby.port}"
        return f"host={hosts} port={ports} user=postgres dbname={database} target_session_attrs=read-write"

    def run(self, program: str, *arguments: str, check: bool = True) -> str:
        """Run one of PostgreSQL's programs as the cluster's user."""
        command = [str(find_programs() / program), *arguments]
        if os.getuid() == 0:
            command = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", *command]
        # to a file: a server that pg_ctl starts would hold a pipe open for as long as it runs
        with tempfile.TemporaryFile("w+") as out:
            found = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd="/",
                timeout=WAIT_S * 2,
                check=False,
            )
            out.seek(0)
            text = out.read()
        if check and found.returncode:
            log = self.folder / "server.log"
            raise RuntimeError(f"{program}: {text}\n{log.read_text()[-2000:] if log.exists() else ''}")
        return text

    # ── start and stop ──

    def make(self) -> None:
        self.run(
            "initdb",
            "-D",
            str(self.data),
            "-A",
            "trust",
            "-U",
            "postgres",
            "-E",
            "UTF8",
            "--locale=C.UTF-8",
            "--no-sync",
        )
        with (self.data / "postgresql.conf").open("a") as file:
            file.write(
                f"listen_addresses = '127.0.0.1'\nunix_socket_directories = '{self.folder}'\nfsync = on\n"
                "max_connections = 300\nshared_buffers = 64MB\nwal_level = replica\nmax_wal_senders = 4\n"
            )

    def start(self) -> None:
        options = f"-p {self.port}"
        self.run(
            "pg_ctl",
            "-D",
            str(self.data),
            "-l",
            str(self.folder / "server.log"),
            "-o",
            options,
            "-w",
            "-t",
            str(WAIT_S),
            "start",
        )

    def stop(self, mode: str = "fast") -> None:
        self.run("pg_ctl", "-D", str(self.data), "-m", mode, "-w", "-t", str(WAIT_S), "stop", check=False)

    def crash(self) -> None:
        """End it as a power cut would: what was not committed is gone, and the rest is recovered."""
        self.stop("immediate")

    @property
    def pid(self) -> int:
        return int((self.data / "postmaster.pid").read_text().splitlines()[0])

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """All of its processes stand still, and connections stay open."""
        pids = [self.pid, *_children(self.pid)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    # ── standby ──

    @contextmanager
    def standby(self, *, synchronous: bool = False) -> Iterator["Cluster"]:
        """A standby of this server. A synchronous one has every commit before it is answered."""
        with make_folder() as folder:
            found = Cluster(folder, free_port())
            self.run(
                "pg_basebackup",
                "-d",
                self.dsn(),
                "-D",
                str(found.data),
                "-R",
                "-X",
                "stream",
                "-c",
                "fast",
                "--no-sync",
            )
            with (found.data / "postgresql.conf").open("a") as file:
                file.write(f"unix_socket_directories = '{folder}'\n")
            found.start()
            if synchronous:
                with psycopg.connect(self.dsn(), autocommit=True) as db:
                    db.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
                    db.execute("SELECT pg_reload_conf()")
                    self._wait_synchronous(db)
            try:
                yield found
            finally:
                found.stop("immediate")

    def _wait_synchronous(self, db: "psycopg.Connection[Any]") -> None:
        until = time.monotonic() + WAIT_S
        while db.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'").fetchone() is None:
            assert time.monotonic() < until, "the standby did not become synchronous"
            time.sleep(0.05)

    def promote(self) -> None:
        self.run("pg_ctl", "-D", str(self.data), "-w", "-t", str(WAIT_S), "promote")

    # ── databases ──

    def database(self, migrations: tuple[Migration, ...] | None = None) -> str:
        """The DSN of a new database with the log's tables; with `migrations`, of other ones, or of none."""
        name = f"log{next(self._numbers)}"
        with psycopg.connect(self.dsn(), autocommit=True) as db:
            if migrations is not None:
                db.execute(f"CREATE DATABASE {name}".encode())
            else:
                if db.execute("SELECT 1 FROM pg_database WHERE datname = 'migrated'").fetchone() is None:
                    db.execute("CREATE DATABASE migrated")
                    migrate_now(self.dsn("migrated"))
                db.execute(f"CREATE DATABASE {name} TEMPLATE migrated".encode())
        if migrations:
            migrate_now(self.dsn(name), migrations)
        return self.dsn(name)


def migrate_now(dsn: str, migrations: tuple[Migration, ...] | None = None) -> tuple[str, ...]:
    with open_database(dsn, name="migrator") as db:
        return migrate(db, migrations)


def mutated(old: str, new: str) -> tuple[Migration, ...]:
    """The migrations with a rule changed. The text must be there, once."""
    found = read_migrations()
    assert sum(each.text.count(old) for each in found) == 1, old
    return tuple(
        Migration(number=each.number, name=each.name, text=each.text.replace(old, new)) for each in found
    )


@contextmanager
def make_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="polarnode-pg-", dir="/tmp"))  # a socket's path is short
    if os.getuid() == 0:
        os.chown(folder, UID, UID)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    with make_folder() as folder:
        found = Cluster(folder, free_port())
        found.make()
        found.start()
        try:
            yield found
        finally:
            found.stop("immediate")


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found]
