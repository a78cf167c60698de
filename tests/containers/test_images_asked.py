"""Hundreds of sessions that want one image at once ask the store one question."""

from pathlib import Path

import pytest
import trio
from attrs import define
from podman_parts import settings

from polarnode.containers import images
from polarnode.containers.images import Images


@define
class Counted:
    """What the real builder is asked, and how many questions stand at once."""

    builder: object
    asked: int = 0
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


@pytest.mark.podman
@pytest.mark.usefixtures("podman")
async def test_one_question_a_name_and_few_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Counted] = []
    opened = images.open_builder

    async def counted(*arguments: object) -> Counted:
        seen.append(Counted(await opened(*arguments)))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(images, "open_builder", counted)
    there = Images(settings=settings(), log=tmp_path / "build.log", report=print)
    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(there.ensure, "base")
            nursery.start_soon(there.ensure, "agent")
    (builder,) = seen
    assert builder.asked == 2
    assert builder.most <= images.CHECKS_AT_ONCE
