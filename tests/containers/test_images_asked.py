"""Hundreds of sessions that want one image at once ask the store one question."""

from pathlib import Path
from secrets import token_hex

import pytest
import trio
from attrs import define
from podman_parts import settings, tools

from polarnode.containers import images
from polarnode.containers.images import Images
from polarnode.core.errors import RuntimeFault


@define
class Counted:
    """What the real builder is asked, and how many questions stand at once."""

    builder: object
    asked: int = 0
    looked: int = 0
    at_once: int = 0
    most: int = 0

    async def stands(self, name: str) -> bool:
        self.asked += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            return bool(await self.builder.stands(name))  # type: ignore[attr-defined]
        finally:
            self.at_once -= 1

    async def refusal(self, name: str) -> str | None:
        self.looked += 1
        found: str | None = await self.builder.refusal(name)  # type: ignore[attr-defined]
        return found


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    """The builders that were opened."""
    seen: list[Counted] = []
    opened = images.open_builder

    async def counted(*arguments: object) -> Counted:
        seen.append(Counted(await opened(*arguments)))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(images, "open_builder", counted)
    return seen


@pytest.mark.podman
@pytest.mark.usefixtures("podman")
async def test_questions_are_shared_and_limited(tmp_path: Path, seen: list[Counted]) -> None:
    """One question is asked for each name, and few at once."""
    there = Images(settings=settings(), log=tmp_path / "build.log", report=print)
    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(there.ensure, "base")
            nursery.start_soon(there.ensure, "agent")
    (builder,) = seen
    assert builder.asked == 2
    assert builder.most <= images.MAX_CHECKS


@pytest.mark.podman
@pytest.mark.usefixtures("podman")
async def test_task_image_lookup_is_cached(tmp_path: Path, seen: list[Counted]) -> None:
    """What a node asks before it takes a task, from many tasks at once."""
    there = Images(settings=settings(), log=tmp_path / "build.log", report=print)
    late, answers = f"localhost/late/{token_hex(4)}:latest", list[str | None]()

    async def ask(name: str) -> None:
        answers.append(await there.refusal(name))

    async with trio.open_nursery() as nursery:
        for name in ("pi", "agent", "localhost/polarnode/base:latest", late):
            for _ in range(20):
                nursery.start_soon(ask, name)
    (builder,) = seen
    assert builder.looked == 4
    assert answers.count(None) == 60
    [why] = {each for each in answers if each is not None}
    assert why.startswith(f"no image is called {late}; there are recipes for base, ")
    assert why.endswith(f"polarnode image build DIR --tag {late}")
    own = tools(tmp_path / "log")
    await own.output("tag", "localhost/polarnode/base:latest", late)
    try:
        await trio.sleep(images.MISSED_S)
        assert await there.refusal(late) is None
        assert builder.looked == 5
    finally:
        with trio.move_on_after(20, shield=True):
            await own.output("untag", "localhost/polarnode/base:latest", late)
    assert await there.refusal(late) is None, "remembered for a while"
    assert builder.looked == 5


@pytest.mark.podman
@pytest.mark.usefixtures("podman")
async def test_podman_fault_refuses_no_task(tmp_path: Path) -> None:
    """Exit code 125 is no answer; the session will say what the fault was."""
    there = Images(settings=settings(), log=tmp_path / "build.log", report=print)
    assert await there.refusal("localhost/UPPER case") is None


async def test_build_step_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for an image is told which one is built, and for how long already."""
    told: list[str] = []
    steps: list[str | None] = []
    there = Images(settings=settings(), log=tmp_path / "build.log", report=told.append)

    class Building:
        async def stands(self, name: str) -> bool:
            await trio.lowlevel.checkpoint()
            return False

        async def build_missing(self, name: str) -> None:
            await trio.lowlevel.checkpoint()
            there._report(f"building runtime {name} on localhost/polarnode/base")
            steps.append(there.step)
            if name == "pi":
                raise RuntimeFault("no network")

    async def opened(*_: object) -> Building:
        await trio.lowlevel.checkpoint()
        return Building()

    monkeypatch.setattr(images, "open_builder", opened)
    await there.ensure("mini_swe_agent")
    assert steps == ["building mini_swe_agent, 0 s"]
    assert told == ["building runtime mini_swe_agent on localhost/polarnode/base"]
    with pytest.raises(RuntimeFault):
        await there.ensure("pi")
    assert there.step is None, "nothing is built any more"
