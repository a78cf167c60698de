"""The load of 64 nodes on one PostgreSQL: what it costs, and how long an event takes from finish to its reader.

    python tests/kits/log_load.py --seconds 60

64 nodes sign, look and ask for work each second; 13 events of 300 kB are finished in one, and one of 100 MB.
"""

import argparse
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from attrs import evolve
from journal_samples import make_spec
from log_kit import EVERY_KIND, end
from postgres_kit import Cluster, running_cluster

from polarnode.core.cursors import Cursor
from polarnode.journal.log.port import Claim, ClaimOffer, LogStatus, NodeFacts
from polarnode.journal.log.postgres import events, membership, places
from polarnode.journal.log.postgres.connection import LogConnection
from polarnode.journal.log.postgres.postgres import MAX_COUNTED_PLACES
from polarnode.journal.queries import ByteCache
from polarnode.journal.values import KEYS_ONLY, EventFilters

BODY = os.urandom(300_000)
LARGE = 100 << 20


def cpu_seconds(cluster: Cluster) -> float:
    """What the server's processes have used, those that have ended included."""
    ticks = 0
    for pid in [
        cluster.pid,
        *map(int, Path(f"/proc/{cluster.pid}/task/{cluster.pid}/children").read_text().split()),
    ]:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15] if pid == cluster.pid else fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def run_load(*, seconds: float, nodes: int, rate: float) -> dict[str, float]:
    with running_cluster() as cluster:
        dsn = cluster.database()
        stopping, sent, seen = threading.Event(), dict[str, float](), dict[str, float]()
        durations: list[float] = []
        main = LogConnection(dsn, "main")
        members = [
            main.run_now(membership.join, NodeFacts(name=f"n{index}")).incarnation for index in range(nodes)
        ]
        for task in range(int(seconds * rate / 4) + 8):
            _submit(main, f"t{task}")

        def node(mine: list[int]) -> None:
            """Some of the nodes, each with connections of its own."""
            logs = [(LogConnection(dsn, f"n{each}"), each) for each in mine]
            beats = 0
            while not stopping.is_set():
                began = time.monotonic()
                for log, incarnation in logs:
                    log.run_now(membership.give_sign, incarnation, load=beats % 7 / 7)
                    beats += 1
                    if beats % 5 == 0:  # LOOK_S, of the watcher and of the scheduler
                        log.run_now(places.put_back_lost)
                        log.run_now(places.count_open, MAX_COUNTED_PLACES)
                        log.run_now(events.read_log_status, 0.0, LogStatus(), weigh=False)
                        log.run_now(places.claim_endings, incarnation, 10)
                        log.run_now(places.sessions_to_stop, incarnation)
                stopping.wait(max(0.0, 1 - (time.monotonic() - began)))

        def finisher(incarnation: int, wait: float) -> None:
            log = LogConnection(dsn, "finisher")
            while not stopping.wait(wait):
                for claim in log.run_now(places.claim, ClaimOffer(incarnation=incarnation, room=1)):
                    _finish(log, claim, BODY, sent, durations)

        def large() -> None:
            log = LogConnection(dsn, "large")
            stopping.wait(seconds / 2)
            (claim,) = log.run_now(places.claim, ClaimOffer(incarnation=members[0], room=1))
            began = time.monotonic()
            body = end(claim)
            body = evolve(body, parts=(*body.parts, *(bytes(4 << 20) for _ in range(LARGE >> 22))))
            log.run_now(places.finish_claim, claim, body)
            durations_large.append(time.monotonic() - began)

        def reader() -> None:
            log, recent, cursor = LogConnection(dsn, "reader"), ByteCache(), Cursor()
            while not stopping.is_set():
                page = log.run_now(
                    events.events, cursor, 64, EventFilters(kinds=EVERY_KIND), KEYS_ONLY, recent
                ).page
                now = time.monotonic()
                seen.update({each.key: now for each in page.events})
                cursor = Cursor(position=page.seen)
                if not page.events:
                    log.run_now(_wait)

        durations_large: list[float] = []
        shares = [members[index::4] for index in range(4)]
        work: list[tuple[Callable[..., None], tuple[object, ...]]] = [
            *((node, (share,)) for share in shares),
            *((finisher, (members[index], 8 / rate)) for index in range(8)),
            (large, ()),
            (reader, ()),
        ]
        threads = [threading.Thread(target=target, args=arguments) for target, arguments in work]
        before, began = cpu_seconds(cluster), time.monotonic()
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        used, took = cpu_seconds(cluster) - before, time.monotonic() - began
        time.sleep(1)
        stopping.set()
        for thread in threads:
            thread.join()
        delays = sorted(seen[key] - at for key, at in sent.items() if key in seen)
        whole = sorted(durations)
        return {
            "events of 300 kB in a second": len(delays) / took,
            "PostgreSQL, of a core": used / took,
            "finish to reader, p50 ms": 1e3 * delays[len(delays) // 2],
            "finish to reader, p99 ms": 1e3 * delays[int(len(delays) * 0.99)],
            "finish to reader, most ms": 1e3 * delays[-1],
            "finish with body, p50 ms": 1e3 * whole[len(whole) // 2],
            "finish with body, p99 ms": 1e3 * whole[int(len(whole) * 0.99)],
            "finish of 100 MB, s": durations_large[0],
        }


def _submit(log: LogConnection, name: str) -> None:
    log.run_now(
        places.submit,
        make_spec(num_samples=4),
        task_id=name,
        session_ids=tuple(f"{name}-{index}" for index in range(4)),
        idempotency_key=None,
        callback_kinds=(),
        submitted=time.time(),
    )


def _finish(
    log: LogConnection, claim: Claim, body: bytes, sent: dict[str, float], durations: list[float]
) -> None:
    ended = end(claim)
    ended = evolve(ended, parts=(*ended.parts, body))
    began = time.monotonic()
    sent[f"trajectory:{claim.session_id}"] = began
    log.run_now(places.finish_claim, claim, ended)
    durations.append(time.monotonic() - began)


def _wait(db: object) -> None:
    db.execute("LISTEN polarnode")  # type: ignore[attr-defined]
    for _ in db.notifies(timeout=1, stop_after=1):  # type: ignore[attr-defined]
        return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--rate", type=float, default=13)
    options = parser.parse_args()
    found = run_load(seconds=options.seconds, nodes=options.nodes, rate=options.rate)
    print("\n".join(f"{name}: {value:.3g}" for name, value in found.items()))


if __name__ == "__main__":
    main()
