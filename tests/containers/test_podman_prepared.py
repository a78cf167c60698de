"""A workspace prepared once, in real containers: what a copy of one is to the last bit, and who pays
for it.
"""

import os
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import trio
from attrs import evolve
from podman_parts import LIFETIME_S, SMALL, settings

from polarnode.containers.prepared import PodmanCopies, mend, workspace_of
from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.runtimes import NodeRuntimes, open_runtimes
from polarnode.core.errors import Refused
from polarnode.core.task import FileSpec, PrepareStep, RuntimeSpec
from polarnode.rollouts import session_containers

pytestmark = pytest.mark.podman

TREE = """
umask 022
python3 -c "import os; open('marked', 'w').close(); os.setxattr('marked', 'user.origin', b'here')"
mkdir -p a/b ~/kept; echo hi > a/b/f; chmod 4755 a/b/f; ln -s f a/b/link; ln a/b/f a/b/hard; mkfifo a/pipe
echo t > /tmp/t; chmod 600 /tmp/t; echo v > /var/tmp/v; echo h > ~/kept/h; touch -d "2020-01-01 00:00:00.123456789" a/old a
rm -f ~/.profile; printf 'x\\000y' > 'a/a name with
a line'
"""
SEEN = (
    "cd /; for at in work home/agent tmp/t var/tmp/v; do find $at -printf '%y %U %G %m %s %n %T@ %l %p\\n';"
    ' done | sort -k9; cat /work/a/b/f /tmp/t /var/tmp/v; python3 -c "import os;'
    " print(os.getxattr('/work/marked', 'user.origin'))\""
)


def spec(*steps: str, user: str | None = None, **more: object) -> RuntimeSpec:
    """A task of its own: nobody else prepares the same."""
    printed = (
        PrepareStep(argv=("sh", "-c", step), user=user) for step in (*steps, f": {secrets.token_hex(8)}")
    )
    return evolve(SMALL, prepare=tuple(printed), **more)  # type: ignore[arg-type]


def opened(
    runtimes: NodeRuntimes, task_spec: RuntimeSpec, session: str, *, shared: bool = True
) -> AbstractAsyncContextManager[PodmanRuntime]:
    async def prepare(runtime: PodmanRuntime) -> None:
        await session_containers.prepare(runtime, task_spec)

    return runtimes.open_prepared(
        task_spec, session_id=session, lifetime_s=LIFETIME_S, prepare=prepare, shared=shared
    )


async def test_copy_equals_its_original(runtimes: NodeRuntimes) -> None:
    task_spec = spec(TREE)
    async with opened(runtimes, task_spec, "first") as first:
        prepared = (await first.run(["sh", "-c", SEEN])).stdout
        env = (await first.run(["env"])).stdout.splitlines()
        async with opened(runtimes, task_spec, "second") as second:
            assert second.shift != first.shift, "in another range of ids"
            assert (await second.run(["sh", "-c", SEEN])).stdout == prepared
            assert sorted((await second.run(["env"])).stdout.splitlines()) == sorted(env)
            assert (await second.run(["sh", "-c", "echo new > /work/a/b/f && rm /tmp/t"])).exit_code == 0, (
                "and it is his"
            )


LISTED = """
cd /work; ls -la --time-style=full-iso . sub ~/.conf; cat /etc/hosts /etc/hostname /proc/self/cgroup
find /etc /home /opt /root /srv /usr /var -xdev -type f -newer given | grep -v "^/etc/host"
"""


@pytest.mark.parametrize("steps", [(), (":",)])
async def test_initial_files_are_consistently_dated(runtimes: NodeRuntimes, steps: tuple[str, ...]) -> None:
    """What sessions begin with has the same times in each, newer than the image."""
    files = tuple(FileSpec(path=path, text="x") for path in ("given", "sub/deep/x"))
    task_spec = evolve(spec(*steps, files=files), **({} if steps else {"prepare": ()}))
    seen = set()
    for session in ("first", "second"):
        async with opened(runtimes, task_spec, session) as runtime:
            await runtime.place({f"{runtime.home}/.conf/settings.json": b"{}"})
            seen.add((await runtime.run(["sh", "-c", LISTED])).stdout)
            await runtime.put({"/work/later": b"x"})
            newer = (await runtime.run(["find", "/work", "-type", "f", "-newer", "/work/given"])).stdout
            assert newer == b"/work/later\n", "what is put later has the true time"
    (only,) = seen
    assert all(name in only for name in (b"given", b"settings.json", b"agent"))
    assert not any(name in only for name in (b"polarnode", b"libpod"))
    assert only.rstrip().endswith(b":/"), "nothing of the image is newer"


async def test_first_session_prepares_for_others(runtimes: NodeRuntimes) -> None:
    """The first session prepares, and the others start from its copy."""
    task_spec = spec("echo $$ > /work/who; sleep 1; date +%s%N > /work/when")
    seen: list[bytes] = []

    async def one(number: int) -> None:
        async with opened(runtimes, task_spec, f"s{number}") as runtime:
            seen.append((await runtime.read("/work/when")) or b"")
            await runtime.put({"/work/when": b"mine"})

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(one, number)
    assert len(seen) == 4
    assert len(set(seen)) == 1
    statistics = runtimes.statistics()
    assert (statistics.copied, statistics.reused, statistics.prepared) == (1, 3, 1)


async def test_running_program_is_not_copied(
    runtimes: NodeRuntimes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    task_spec = spec("sleep 1000 >/dev/null 2>&1 &")
    for number in range(3):
        async with opened(runtimes, task_spec, f"s{number}") as runtime:
            assert await runtime.busy()
    assert runtimes.statistics().copied == 0
    assert caplog.text.count("one of its steps left a process running") == 1


async def test_failing_step_is_refused_to_each(runtimes: NodeRuntimes) -> None:
    task_spec = spec("echo no such thing >&2; exit 3")
    for number in range(2):
        with pytest.raises(Refused, match="exit code 3: no such thing"):
            async with opened(runtimes, task_spec, f"s{number}"):
                pass
    assert runtimes.statistics().live == 0
    assert runtimes.statistics().copied == 0


async def test_removed_copy_is_made_again(runtimes: NodeRuntimes) -> None:
    task_spec = spec("echo here > /work/here")
    async with opened(runtimes, task_spec, "one"):
        pass
    (state,) = runtimes._workspaces._states.values()
    assert state.image is not None
    assert await runtimes._workspaces.copies.remove(state.image)
    async with opened(runtimes, task_spec, "two") as runtime:
        assert await runtime.read("/work/here") == b"here\n"
    assert runtimes.statistics().copied == 2


async def test_least_recent_unused_copy_goes(podman: None) -> None:
    async with open_runtimes(evolve(settings(), prepared=1)) as runtimes:
        first, second = spec("echo 1 > /work/n"), spec("echo 2 > /work/n")
        async with opened(runtimes, first, "one"), opened(runtimes, first, "two"):
            async with opened(runtimes, second, "three"):
                await until(lambda: runtimes.statistics().copied == 2)
            await trio.sleep(0.5)
            assert runtimes._workspaces._states, "and nobody is stuck"
        async with opened(runtimes, spec("echo 3 > /work/n"), "four"):
            await until(lambda: runtimes.statistics().prepared == 1)


async def test_warm_containers_start_from_copy(podman: None) -> None:
    async with open_runtimes(settings(warm=2)) as runtimes:
        task_spec = spec("echo here > /work/here")
        runtimes.prewarm(task_spec, 9)
        await until(lambda: runtimes.statistics().warm == 1)
        async with opened(runtimes, task_spec, "one"):
            await until(lambda: runtimes.statistics().warm == 1)
            before = runtimes.statistics().served_warm
            async with opened(runtimes, task_spec, "two") as runtime:
                assert await runtime.read("/work/here") == b"here\n"
            assert runtimes.statistics().served_warm == before + 1
        runtimes.prewarm(task_spec, 0)
        await until(lambda: runtimes.statistics().warm == 0)


async def test_another_node_finds_the_copy(podman: None) -> None:
    task_spec = spec("date +%s%N > /work/when")
    async with open_runtimes(settings("one")) as one, open_runtimes(settings("two")) as two:
        async with opened(one, task_spec, "first") as runtime:
            when = await runtime.read("/work/when")
        async with opened(two, task_spec, "second") as runtime:
            assert await runtime.read("/work/when") == when
        assert (two.statistics().copied, two.statistics().reused) == (0, 1)


async def test_old_copies_of_dead_nodes_go(runtimes: NodeRuntimes) -> None:
    """Copies of dead nodes go when they are old or many."""
    copies, starter = runtimes._workspaces.copies, runtimes._pool.starter
    assert isinstance(copies, PodmanCopies)
    ours = PodmanCopies(
        api=copies.api, limiter=copies.limiter, owner=evolve(copies.owner, pid=2**22 + 7), most=32
    )
    workspace_ = workspace_of(spec("true"), runtimes._pool.shape(SMALL).image)
    assert workspace_ is not None
    shape = runtimes._pool.shape(SMALL)
    async with runtimes._pool.lend_runtime(
        await starter.start(shape, session_id="dead", lifetime_s=LIFETIME_S)
    ) as runtime:
        name = await ours.make(workspace_, runtime)
    assert await copies.exists(name)
    await copies.prune(most=10_000)
    assert await copies.exists(name), "its node may be started again"
    await copies.prune(most=0)
    assert not await copies.exists(name)


async def until(happened: Callable[[], bool]) -> None:
    with trio.fail_after(120):
        while not happened():  # noqa: ASYNC110 (seen from outside)
            await trio.sleep(0.05)


def test_layer_ids_are_shifted_back(tmp_path: Path) -> None:
    """Ids of the container's range move down, any other stays; set-id bits and times are what they were."""
    layer, source = tmp_path / "layer", tmp_path / "source"
    for folder in (layer, source):
        (folder / "deep").mkdir(parents=True)
        (folder / "deep/program").write_bytes(b"x")
        (folder / "deep/link").symlink_to("/etc/passwd")
    os.utime(source / "deep/program", ns=(1, 1_234_567_891))
    os.utime(source / "deep", ns=(1, 77))
    for path, ids in (("deep", 500_000), ("deep/program", 501_000), ("deep/link", 12)):
        os.chown(layer / path, ids, ids, follow_symlinks=False)
    (layer / "deep/program").chmod(0o4755)
    mend(layer, source, 500_000)
    printed = {path: (layer / path).lstat() for path in ("deep", "deep/program", "deep/link")}
    assert [(found.st_uid, found.st_gid) for found in printed.values()] == [(0, 0), (1000, 1000), (12, 12)]
    assert (
        printed["deep/program"].st_mode & 0o7777,
        printed["deep/program"].st_mtime_ns,
        printed["deep"].st_mtime_ns,
    ) == (0o4755, 1_234_567_891, 77)
    assert Path("/etc/passwd").stat().st_uid == 0
