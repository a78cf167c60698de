"""The control plane of an open node: its routes and its socket."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from socket import socket
from typing import Final

import trio
from attrs import evolve

from polarnode.api.app import control_plane
from polarnode.api.fork_routes import ForkRoutes
from polarnode.api.live import LiveSessionRoutes
from polarnode.api.logs import LogRoutes
from polarnode.api.proxy import DrainRoutes, OtherNodes, PassingRoutes, open_others
from polarnode.api.routes import (
    AdapterRoutes,
    CaptureRoutes,
    EvaluationRoutes,
    Routes,
    ScoreRoutes,
    WeightsRoutes,
)
from polarnode.api.timeseries import History
from polarnode.api.weight_files import WeightFiles
from polarnode.api.weight_nodes import ModelNodes, WeightNodeRoutes
from polarnode.http.asgi import BrowserGuard, RouteRow
from polarnode.http.server import CONTROL_CONNECTIONS, Address, Certificate, open_server
from polarnode.integrations.polar.extension import POLAR_OF_SESSION, polar_extension
from polarnode.integrations.sglang import sglang_extension
from polarnode.integrations.sglang_nodes import SglangNodes
from polarnode.journal.log.port import LogAway
from polarnode.node.node import Node, control_certificate
from polarnode.node.opening import sessions_dir
from polarnode.rollouts.session import LOG_LIMIT
from polarnode.support.concurrency import open_background

CERTIFICATE_S: Final = (
    1.0  # between looks at which certificate is shown: other nodes refuse it until they know
)


@asynccontextmanager
async def serve_control_plane(node: Node, listener: socket | None = None) -> AsyncIterator[Address]:
    """The trainer's socket of a node, for as long as the block; gives its address. `listener` is the socket,
    where it is bound already.
    """
    config = node.config
    async with (
        open_others(node.log, name=config.node_id, token=config.token) as others,
        _served(node, others, listener) as address,
    ):
        yield address


@asynccontextmanager
async def _served(node: Node, others: OtherNodes, listener: socket | None) -> AsyncIterator[Address]:
    config, history = node.config, History(figures=node.figures, now=time.time)
    nodes = ModelNodes(others=others, weights=node.weights)
    own = _rows(node, others, history)
    rows = PassingRoutes(others).rows(WeightNodeRoutes(nodes).rows(own))
    by_token = config.token is not None
    guard = BrowserGuard(bound=config.host.lower(), allowed=config.allowed_hosts, any_host=by_token)
    sglang = sglang_extension(
        node,
        weights=node.weights,
        control=node.engine_control,
        adapters=node.adapters,
        memory_saver=config.memory_saver != "off",
    )
    sglang = evolve(sglang, rows=tuple(SglangNodes(nodes).rows(sglang.rows)))
    polar = polar_extension(node)
    polar = evolve(polar, rows=tuple(PassingRoutes(others).rows(polar.rows, POLAR_OF_SESSION)))
    app = control_plane(rows, token=config.token, guard=guard, extensions=(polar, sglang))
    where, certificate = Address(host=config.host, port=config.port), control_certificate(config)
    served = open_server(app, listener or where, connections=CONTROL_CONNECTIONS, certificate=certificate)
    told = partial(_tell_certificate, node, certificate)
    async with open_background(history.run), open_background(told), served as address:
        node.callbacks.own_ports.append({address.port, node.captures.port})
        yield address


async def _tell_certificate(node: Node, certificate: Certificate | None, ready: trio.Event) -> None:
    """Keep what the other nodes pin the one that is shown, whose files may be renewed meanwhile."""
    ready.set()
    told, log = node.scheduler.facts.certificate, node.scheduler.log
    while certificate is not None and log.shared:
        if certificate.digest != told:
            with suppress(LogAway):  # and told again
                await node.scheduler.renew_certificate(certificate.digest)
                told = certificate.digest
        await trio.sleep(CERTIFICATE_S)


def _rows(node: Node, others: OtherNodes, history: History) -> Iterator[RouteRow]:
    """The node's own routes."""
    config = node.config
    yield from (
        *Routes(service=node, sessions_dir=sessions_dir(config)).rows(),
        *LiveSessionRoutes(node, others).rows(),
        *DrainRoutes(others, node.drain).rows(),
        *WeightsRoutes(weights=node.weights, control=node.engine_control).rows(),
        *AdapterRoutes(store=node.adapters).rows(),
        *CaptureRoutes(captures=node.captures).rows(),
        *ForkRoutes(service=node).rows(),
        *EvaluationRoutes(evaluations=node.evaluations).rows(),
        *ScoreRoutes(scoring=node.scheduler.services.scoring).rows(),
        *LogRoutes(
            service=node, state=Path(config.state_dir), sessions_dir=sessions_dir(config), ring=LOG_LIMIT
        ).rows(),
        *WeightFiles(node.weights, node.adapters).rows(),
        *history.rows(),
    )
