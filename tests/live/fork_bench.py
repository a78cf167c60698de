"""Sessions of real harnesses in real containers, whose engine says a script: what a
fork is made from, without a node around it.
"""

from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import trio
from attrs import define, field, frozen
from fakes_engine import ScriptedEngine
from matrix_cases import Call, Step
from steering import turns_so_far, written
from tokens_kit import TINY

from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.runtimes import NodeRuntimes
from polarnode.core.conversation import Sampling
from polarnode.core.ports import Endpoint, GenerateOrder, HarnessOrder, Launch
from polarnode.core.task import Budgets, RuntimeSpec
from polarnode.gateway.call import Model
from polarnode.gateway.endpoint import ModelPlane
from polarnode.gateway.live_sessions import LiveSession, LiveSessions, SessionBudget
from polarnode.harnesses import HARNESSES
from polarnode.http.server import open_server
from polarnode.merge.lineage import Lineages
from polarnode.tokens.template import LoadedModel, load_model

CONTEXT = 65_536  # claude_code's first prompt has 19,000 tokens
LIFETIME_S = 900.0
RUN_S = 300.0  # of one harness on a busy machine: the slowest takes 15 s on a quiet one
SECRET = b"secret of all sessions here 32 B"


@cache
def model() -> LoadedModel:
    return load_model(TINY)


def shell(harness: str, line: str) -> Call:
    """A shell command, in the words of a harness's own tool."""
    return {
        "pi": Call("bash", {"command": line}),
        "codex": Call("exec_command", {"cmd": line}),
        "claude_code": Call("Bash", {"command": line, "description": "Look around"}),
        "mini_swe_agent": Call("bash", {"command": line}),
        # it refuses commands with $( in them
        "gemini_cli": Call(
            "run_shell_command", {"command": f"echo {b64encode(line.encode()).decode()} | base64 -d | sh"}
        ),
        "qwen_code": Call(
            "run_shell_command", {"command": line, "is_background": False, "description": "Look around"}
        ),
    }[harness]


@define(eq=False)
class ForkEngine(ScriptedEngine):
    """An engine that says one script, by the turns that a prompt holds."""

    vocab_size: int = field(factory=lambda: model().tokenizer.vocab_size)
    context_length: int = CONTEXT
    chunk: int = 64
    script: Sequence[Step] = ()

    def __attrs_post_init__(self) -> None:
        self.reply = self._said

    def _said(self, order: GenerateOrder) -> Sequence[int]:
        loaded = model()
        place = min(turns_so_far(order.prompt, loaded, calling=True), len(self.script) - 1)
        thinks = loaded.template.opens_thinking(order.prompt)
        return written(self.script[place], loaded.tokenizer, loaded.family, in_thought=thinks)


@frozen(kw_only=True)
class ForkBench:
    """Sessions of one model in containers of `runtimes`."""

    runtimes: NodeRuntimes
    folder: Path
    harness: str
    settings: dict[str, Any]
    engine: ForkEngine = field(factory=ForkEngine)
    sessions: LiveSessions = field(factory=LiveSessions)
    plane: ModelPlane = field(init=False)

    @plane.default
    def _make_plane(self) -> ModelPlane:
        loaded = model()
        served = Model(
            engine=self.engine,
            template=loaded.template,
            tokenizer=loaded.tokenizer,
            family=loaded.family,
            context_length=CONTEXT,
            id="tiny",
            now=lambda: 1_700_000_000.0,
        )
        return ModelPlane(sessions=self.sessions, model=served)

    def session(self, key: str, lineages: Lineages) -> LiveSession:
        return LiveSession(
            session_id="forked",
            key=f"sk-{key}",
            lineages=lineages,
            sampling=Sampling(),
            budget=SessionBudget(Budgets()),
            record=lambda turn: None,
        )

    @asynccontextmanager
    async def opened(self, live: LiveSession) -> AsyncIterator[PodmanRuntime]:
        """A container of the harness, whose endpoint serves one session."""
        spec = RuntimeSpec(image=HARNESSES[self.harness].image, memory_mb=2048, pids=256)
        async with self.runtimes.open(spec, session_id=live.key, lifetime_s=LIFETIME_S) as runtime:
            self.sessions.add(live)
            try:
                async with open_server(self.plane.app_for(live.session_id), runtime.endpoint):
                    yield runtime
            finally:
                self.sessions.remove(live)

    async def run(
        self,
        runtime: PodmanRuntime,
        live: LiveSession,
        launch: Callable[[HarnessOrder], Launch],
        instruction: str,
    ) -> int:
        """Run the harness to its end; its exit code."""
        launched = launch(
            HarnessOrder(
                instruction=instruction,
                endpoint=Endpoint(
                    base_url=runtime.base_url, key=live.key, context_length=CONTEXT, model="tiny"
                ),
                workdir=runtime.workdir,
                home=runtime.home,
                model_name=None,
                settings=self.settings,
                env={},
            )
        )
        await runtime.place(launched.files)
        with trio.fail_after(RUN_S):
            return await runtime.run_logged(
                launched.argv, env=launched.env, log=self.log(live), limit=1 << 20, stdin=launched.stdin
            )

    def log(self, live: LiveSession) -> Path:
        return self.folder / f"{live.key}.log"


async def copied(runtime: PodmanRuntime) -> bytes:
    """Home and workdir as a tar."""
    folders = (runtime.home.lstrip("/"), runtime.workdir.lstrip("/"))
    ended = await runtime.run(("tar", "-cpf", "-", "-C", "/", *folders))
    assert (ended.exit_code, ended.truncated) == (0, False), ended.stderr
    return ended.stdout


async def restored(runtime: PodmanRuntime, files: bytes) -> None:
    """Home and workdir as they were in a tar."""
    ended = await runtime.run(("tar", "-xpf", "-", "-C", "/"), stdin=files)
    assert ended.exit_code == 0, ended.stderr


async def digest(runtime: PodmanRuntime) -> bytes:
    """The names, modes, owners and contents of what is in the workdir."""
    ended = await runtime.run(
        ("tar", "-c", "--sort=name", "--mtime=@0", "-C", runtime.workdir, "-f", "-", ".")
    )
    assert ended.exit_code == 0, ended.stderr
    return ended.stdout
