"""The Ray driver of a launcher: a process of its own, because Ray ends whoever called `ray.init` when its
head is gone for a minute.

    python -m polarnode.fleet.ray_hosts

Reads a line of JSON, a RayOrder, from standard input, and ends with it. Writes a line of JSON, RayNews, when
something changed and every BEAT_S. It keeps one detached actor on each machine and asks it for the address of
its node; actors and nodes live on when this process ends. The only module of the fleet that imports Ray.
"""

import logging
import os
import sys
import threading
import time
from typing import IO, Any, Final

import ray
from attrs import define, evolve, field
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polarnode.core.codec.json import dump_json, plain, read_json, structure
from polarnode.fleet.ray_host import STOP_S, NodeHost
from polarnode.fleet.ray_machines import (
    NAMESPACE,
    RESOURCE,
    HostedNode,
    HostOrder,
    RayMachine,
    RayNews,
    RayOrder,
    machines,
    refusal,
)

logger = logging.getLogger(__name__)

POLL_S: Final = 1.0  # between looks at ray.nodes(): 0.3 ms each
SOON_S: Final = 1.0  # before an actor whose node does not serve is asked again
# before one whose node serves is: 1.5 ms of this process and the actor's; an address hardly ever changes
LATER_S: Final = 10.0
# for an actor to answer its first question: a worker starts in 1 to 5 s, in 20 s where many do at once
PATIENCE_S: Final = 30.0
BEAT_S: Final = 10.0  # between lines without news


@define(eq=False, kw_only=True)
class _Kept:
    """What is known of one machine's actor."""

    actor: Any = None
    answer: Any = None  # a question's, that has not come
    asked: float = 0.0
    due: float = 0.0
    report: HostedNode | None = None
    problem: str = ""


@define(eq=False, kw_only=True)
class RayDriver:
    """Keeps the actors of one order, from one thread."""

    order: RayOrder
    _kept: dict[str, _Kept] = field(factory=dict, init=False)  # by Ray's id of the machine

    def step(self, listed: list[dict[str, Any]], now: float) -> RayNews:
        """Look at the cluster as `ray.nodes()` has it, and at answers that came. `now`: monotonic seconds."""
        found = {each.ray_id: each for each in machines(listed, self.order)}
        if any(each.marked for each in found.values()):
            self.order = evolve(self.order, marked=True)
        self._kept = {ray_id: self._kept.get(ray_id) or _Kept() for ray_id in found}
        for ray_id, kept in self._kept.items():
            try:
                self._attend(found[ray_id], kept, now)
            except (RayError, ValueError) as error:  # ValueError: a name that is being given back
                kept.actor = kept.answer = None
                kept.problem = f"its actor: {str(error).strip().splitlines()[0]}"
                kept.due = now + SOON_S
        return self._news(found)

    def _attend(self, machine: RayMachine, kept: _Kept, now: float) -> None:
        if reason := refusal(machine, self.order.token):
            kept.problem = reason
            return
        if kept.answer is not None:
            ready, _ = ray.wait([kept.answer], timeout=0)
            if ready:
                (answer, kept.answer) = (kept.answer, None)
                self._take(kept, ray.get(answer), now)
            elif now - kept.asked > PATIENCE_S:
                gpus = self.order.gpus_per_node
                kept.problem = f"its actor does not answer: are {gpus} GPUs of it free in Ray?"
            return
        if now >= kept.due:
            kept.actor = kept.actor or _actor(HostOrder(machine=machine, order=self.order))
            kept.answer, kept.asked = kept.actor.look.remote(), now

    def _take(self, kept: _Kept, report: HostedNode, now: float) -> None:
        kept.report, kept.problem = report, report.problem
        if report.digest != self.order.digest:
            kept.problem = (
                "its node was started with other options, or another token or log: end it with --stop first"
            )
        kept.due = now + (LATER_S if report.url and not report.problem else SOON_S)

    def _news(self, found: dict[str, RayMachine]) -> RayNews:
        nodes, problems = dict[str, str](), dict[str, str]()
        for ray_id, kept in self._kept.items():
            name = found[ray_id].name
            if kept.report is not None and kept.report.url:
                nodes[name] = kept.report.url
            if kept.problem:
                problems[name] = kept.problem
        return RayNews(nodes=nodes, problems=problems, marked=self.order.marked)


def _actor(given: HostOrder) -> Any:
    """The actor of a machine: the one that is there, or a new one."""
    machine = given.machine
    options: dict[str, Any] = {
        "name": f"node-{machine.ray_id}",
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_concurrency": 4,  # a question is answered while `stop` waits
        "num_cpus": 0,  # its node's containers are not Ray's to count
        "num_gpus": given.order.gpus_per_node,
        "resources": {RESOURCE: 1} if machine.marked else {},
        "scheduling_strategy": NodeAffinitySchedulingStrategy(machine.ray_id, soft=False),
    }
    return ray.remote(NodeHost).options(**options).remote(given)


def stop_all() -> int:
    """End every node that an actor of this cluster has, and the actors. Gives how many there were."""
    actors = [ray.get_actor(name, namespace=NAMESPACE) for name in ray.util.list_named_actors()]
    asked = [each.stop.remote() for each in actors]
    if asked:
        ray.wait(asked, num_returns=len(asked), timeout=3 * STOP_S)
    for each in actors:
        ray.kill(each, no_restart=True)
    return len(actors)


# ── the process ────────────────────────────────────────────────────────────


def _write(out: IO[bytes], news: RayNews) -> None:
    out.write(dump_json(plain(news)) + b"\n")
    out.flush()


def _end_with_input() -> None:
    """End when the launcher has: it holds the other end of standard input."""
    while os.read(0, 4096):
        """Nothing is written there after the order."""
    os._exit(0)


def keep(order: RayOrder, out: IO[bytes]) -> None:
    """Keep the actors until Ray raises or ends this process."""
    driver, written, at = RayDriver(order=order), RayNews(), 0.0
    while True:
        now = time.monotonic()
        news = driver.step(ray.nodes(), now)
        if news != written or now - at >= BEAT_S:
            _write(out, news)
            written, at = news, now
        time.sleep(POLL_S)


def main() -> None:
    """The program."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Ray prints: that belongs in the log
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.basicConfig(level=logging.INFO)
    with open(0, "rb", buffering=0, closefd=False) as given:
        order = structure(read_json(given.readline()), RayOrder)
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        ray.init(address=order.address, namespace=NAMESPACE, log_to_driver=False)
    except Exception as error:  # Ray raises whatever its libraries do
        logger.exception("no Ray cluster")
        _write(
            out, RayNews(error=f"there is no Ray cluster at {order.address}: {str(error).splitlines()[0]}")
        )
        sys.exit(1)
    if order.stop:
        _write(out, RayNews(stopped=stop_all()))
        return
    keep(order, out)


if __name__ == "__main__":
    main()
