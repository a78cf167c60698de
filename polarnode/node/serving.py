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
    ControlRoutes,
    EvaluationRoutes,
    ScoreRoutes,
    WeightsRoutes,
)
from polarnode.api.timeseries import History
from polarnode.api.weight_files import WeightFileRoutes
from polarnode.api.weight_nodes import ModelNodes, WeightNodeRoutes
from polarnode.http.asgi import BrowserGuard, RouteRow
from polarnode.http.server import MAX_CONTROL_CONNECTIONS, Address, Certificate, open_server
from polarnode.integrations.polar.extension import POLAR_SESSION_ROUTES, polar_extension
from polarnode.integrations.sglang import sglang_extension
from polarnode.integrations.sglang_nodes import SglangNodes
from polarnode.journal.log.port import LogUnavailable
from polarnode.node.node import Node, control_certificate
from polarnode.node.opening import sessions_dir
from polarnode.rollouts.session import MAX_HARNESS_LOG_BYTES
from polarnode.support.concurrency import open_background

CERTIFICATE_INTERVAL_S: Final = (
    1.0  # between looks at the certificate that is shown: other nodes refuse a new one until they are told
)


@asynccontextmanager
async def serve_control_plane(node: Node, listener: socket | None = None) -> AsyncIterator[Address]:
    """Serve the control plane of a node for as long as the block. Yields its address. `listener` is its
    socket, where that is bound already.
    """
    config = node.config
    async with (
        open_others(node.log, name=config.node_id, token=config.token) as others,
        _serve_routes(node, others, listener) as address,
    ):
        yield address


@asynccontextmanager
async def _serve_routes(node: Node, others: OtherNodes, listener: socket | None) -> AsyncIterator[Address]:
    config, history = node.config, History(figures=node.figures, now=time.time)
    nodes = ModelNodes(others=others, weights=node.weights)
    own = _own_routes(node, others, history)
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
    polar = evolve(polar, rows=tuple(PassingRoutes(others).rows(polar.rows, POLAR_SESSION_ROUTES)))
    app = control_plane(rows, token=config.token, guard=guard, extensions=(polar, sglang))
    where, certificate = Address(host=config.host, port=config.port), control_certificate(config)
    served = open_server(app, listener or where, connections=MAX_CONTROL_CONNECTIONS, certificate=certificate)
    told = partial(_renew_certificate, node, certificate)
    async with open_background(history.run), open_background(told), served as address:
        node.callbacks.own_ports.append({address.port, node.captures.port})
        yield address


async def _renew_certificate(node: Node, certificate: Certificate | None, ready: trio.Event) -> None:
    """Tell the other nodes the certificate that is shown, which they pin. Its files may be renewed
    meanwhile.
    """
    ready.set()
    told, log = node.membership.facts.certificate, node.log
    while certificate is not None and log.shared:
        if certificate.digest != told:
            with suppress(LogUnavailable):  # it is told again at the next look
                await node.membership.renew_certificate(certificate.digest)
                told = certificate.digest
        await trio.sleep(CERTIFICATE_INTERVAL_S)


def _own_routes(node: Node, others: OtherNodes, history: History) -> Iterator[RouteRow]:
    """The node's own routes."""
    config = node.config
    yield from (
        *ControlRoutes(service=node, sessions_dir=sessions_dir(config)).rows(),
        *LiveSessionRoutes(node, others).rows(),
        *DrainRoutes(others, node.membership.drain).rows(),
        *WeightsRoutes(weights=node.weights, control=node.engine_control).rows(),
        *AdapterRoutes(store=node.adapters).rows(),
        *CaptureRoutes(captures=node.captures).rows(),
        *ForkRoutes(service=node).rows(),
        *EvaluationRoutes(evaluations=node.evaluations).rows(),
        *ScoreRoutes(scoring=node.scheduler.admission.scoring).rows(),
        *LogRoutes(
            service=node,
            state=Path(config.state_dir),
            sessions_dir=sessions_dir(config),
            ring=MAX_HARNESS_LOG_BYTES,
        ).rows(),
        *WeightFileRoutes(node.weights, node.adapters).rows(),
        *history.rows(),
    )
