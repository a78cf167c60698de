"""`polarnode gym-agent`: a NeMo Gym agent server in front of a running node."""

from pathlib import Path

import trio
from rich.console import Console

from polarnode.cli.output import open_console
from polarnode.cli.serve import StopRequest, stop_on_signals
from polarnode.client.asynchronous import AsyncPolarnodeClient
from polarnode.http.server import Address, open_server
from polarnode.integrations.nemo_gym.app import Rollouts, create_gym_app
from polarnode.integrations.nemo_gym.requests import TaskTemplate
from polarnode.sources.reading import task_value


def serve_agent(template: Path, *, url: str, token: str | None, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM. Refused when the template is no task, Unreachable when the node does not
    answer.
    """
    parsed = TaskTemplate(value=task_value(template))
    trio.run(
        _serve, parsed, AsyncPolarnodeClient(url, token=token), Address(host=host, port=port), open_console()
    )


async def _serve(
    template: TaskTemplate, client: AsyncPolarnodeClient, where: Address, console: Console
) -> None:
    async with trio.open_nursery() as nursery, client:
        stop = StopRequest(nursery.cancel_scope.cancel)
        await nursery.start(stop_on_signals, stop)
        rollouts = Rollouts(client)
        await nursery.start(rollouts.follow)
        async with open_server(create_gym_app(rollouts, template), where) as address:
            console.print(
                f"serving NeMo Gym's /run on http://{address.host}:{address.port} · node {client.base_url}"
            )
            await trio.sleep_forever()
