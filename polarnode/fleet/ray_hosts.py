"""The Ray driver of a launcher. It is a process of its own, because Ray ends a process that called `ray.init`
when the cluster's head is gone for a minute.

    python -m polarnode.fleet.ray_hosts

The driver reads a line of JSON, a RayOrder, from standard input, and ends when that is closed. It writes a
line of JSON, a RayNews, when something changed and every BEAT_S. It keeps one detached actor on each machine
and asks it for the address of its node. Actors and nodes live on when this process ends. This is the only
module of the fleet that imports Ray.
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
from polarnode.fleet.ray_host import STOP_TIMEOUT_S, NodeHost
from polarnode.fleet.ray_machines import (
    ACTOR_NAMESPACE,
    HOST_RESOURCE,
    HostedNode,
    HostOrder,
    RayMachine,
    RayNews,
    RayOrder,
    find_machines,
    machine_refusal,
)

logger = logging.getLogger(__name__)

POLL_INTERVAL_S: Final = 1.0  # between looks at ray.nodes(), which take 0.3 ms each
ASK_AGAIN_S: Final = 1.0  # until an actor whose node does not serve is asked again
# Until an actor whose node serves is asked again. That costs this process and the actor's 1.5 ms, and an
# address hardly ever changes.
ASK_SERVING_S: Final = 10.0
# Longest wait for an actor's answer. A worker starts in 1 to 5 s, or in 20 s where many do at once.
ANSWER_TIMEOUT_S: Final = 30.0
NEWS_INTERVAL_S: Final = 10.0  # between lines where nothing changed


@define(eq=False, kw_only=True)
class _ActorState:
    """What is known of one machine's actor."""

    actor: Any = None
    answer: Any = None  # Ray's reference to an answer that has not come yet
    asked: float = 0.0
    due: float = 0.0
    report: HostedNode | None = None
    problem: str = ""


@define(eq=False, kw_only=True)
class RayDriver:
    """Keeps the actors of one order. It is used from one thread."""

    order: RayOrder
    _actors: dict[str, _ActorState] = field(factory=dict, init=False)  # by Ray's id of the machine

    def poll_cluster(self, listed: list[dict[str, Any]], now: float) -> RayNews:
        """Look at the cluster as `ray.nodes()` lists it, and at answers that came. `now` is in monotonic
        seconds.
        """
        found = {each.ray_id: each for each in find_machines(listed, self.order)}
        if any(each.marked for each in found.values()):
            self.order = evolve(self.order, marked=True)
        self._actors = {ray_id: self._actors.get(ray_id) or _ActorState() for ray_id in found}
        for ray_id, kept in self._actors.items():
            try:
                self._ask_actor(found[ray_id], kept, now)
            except (RayError, ValueError) as error:  # ValueError: Ray is still releasing the actor's name
                kept.actor = kept.answer = None
                kept.problem = f"its actor: {str(error).strip().splitlines()[0]}"
                kept.due = now + ASK_AGAIN_S
        return self._current_news(found)

    def _ask_actor(self, machine: RayMachine, kept: _ActorState, now: float) -> None:
        if reason := machine_refusal(machine, self.order.token):
            kept.problem = reason
            return
        if kept.answer is not None:
            ready, _ = ray.wait([kept.answer], timeout=0)
            if ready:
                (answer, kept.answer) = (kept.answer, None)
                self._take_report(kept, ray.get(answer), now)
            elif now - kept.asked > ANSWER_TIMEOUT_S:
                gpus = self.order.gpus_per_node
                kept.problem = f"its actor does not answer: are {gpus} GPUs of it free in Ray?"
            return
        if now >= kept.due:
            kept.actor = kept.actor or _actor(HostOrder(machine=machine, order=self.order))
            kept.answer, kept.asked = kept.actor.look.remote(), now

    def _take_report(self, kept: _ActorState, report: HostedNode, now: float) -> None:
        kept.report, kept.problem = report, report.problem
        if report.digest != self.order.digest:
            kept.problem = (
                "its node was started with other options, or another token or log: end it with --stop first"
            )
        kept.due = now + (ASK_SERVING_S if report.url and not report.problem else ASK_AGAIN_S)

    def _current_news(self, found: dict[str, RayMachine]) -> RayNews:
        nodes, problems = dict[str, str](), dict[str, str]()
        for ray_id, kept in self._actors.items():
            name = found[ray_id].name
            if kept.report is not None and kept.report.url:
                nodes[name] = kept.report.url
            if kept.problem:
                problems[name] = kept.problem
        return RayNews(nodes=nodes, problems=problems, marked=self.order.marked)


def _actor(given: HostOrder) -> Any:
    """The actor of a machine, which is created if there is none."""
    machine = given.machine
    options: dict[str, Any] = {
        "name": f"node-{machine.ray_id}",
        "namespace": ACTOR_NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_concurrency": 4,  # a question is answered while `stop` waits
        "num_cpus": 0,  # Ray does not count the CPUs of the node's containers
        "num_gpus": given.order.gpus_per_node,
        "resources": {HOST_RESOURCE: 1} if machine.marked else {},
        "scheduling_strategy": NodeAffinitySchedulingStrategy(machine.ray_id, soft=False),
    }
    return ray.remote(NodeHost).options(**options).remote(given)


def stop_actors() -> int:
    """End every node that an actor of this cluster keeps, and the actors. Returns the number of actors."""
    actors = [ray.get_actor(name, namespace=ACTOR_NAMESPACE) for name in ray.util.list_named_actors()]
    asked = [each.stop.remote() for each in actors]
    if asked:
        ray.wait(asked, num_returns=len(asked), timeout=3 * STOP_TIMEOUT_S)
    for each in actors:
        ray.kill(each, no_restart=True)
    return len(actors)


# ── the process ────────────────────────────────────────────────────────────


def _write_news(out: IO[bytes], news: RayNews) -> None:
    out.write(dump_json(plain(news)) + b"\n")
    out.flush()


def _end_with_input() -> None:
    """End this process when the launcher ends, which holds the other end of standard input."""
    while os.read(0, 4096):
        """Nothing is written there after the order."""
    os._exit(0)


def keep_actors(order: RayOrder, out: IO[bytes]) -> None:
    """Keep the actors until Ray raises or ends this process."""
    driver, written, at = RayDriver(order=order), RayNews(), 0.0
    while True:
        now = time.monotonic()
        news = driver.poll_cluster(ray.nodes(), now)
        if news != written or now - at >= NEWS_INTERVAL_S:
            _write_news(out, news)
            written, at = news, now
        time.sleep(POLL_INTERVAL_S)


def main() -> None:
    """Run the driver."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Ray prints to standard output belongs in the log
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.basicConfig(level=logging.INFO)
    with open(0, "rb", buffering=0, closefd=False) as given:
        order = structure(read_json(given.readline()), RayOrder)
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        ray.init(address=order.address, namespace=ACTOR_NAMESPACE, log_to_driver=False)
    except Exception as error:  # Ray passes on any error of its libraries
        logger.exception("no Ray cluster")
        _write_news(
            out, RayNews(error=f"there is no Ray cluster at {order.address}: {str(error).splitlines()[0]}")
        )
        sys.exit(1)
    if order.stop:
        _write_news(out, RayNews(stopped=stop_actors()))
        return
    keep_actors(order, out)


if __name__ == "__main__":
    main()
