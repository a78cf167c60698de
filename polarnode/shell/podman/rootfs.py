"""The Debian that images stand on: the public image asked for, else one that can be pulled, else one built from this machine's own archive.

Which was taken is said aloud. Nothing here names a host: the public image is asked for by its short name, which the machine's own
registries.conf resolves or does not, and the archive is the one this machine's apt uses.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import trio

from polarnode.errors import RuntimeFault, boundary
from polarnode.shell.podman.recipes import PREFIX
from polarnode.shell.podman.store import Store
from polarnode.shell.podman.tools import Tools

PUBLIC = "debian:bookworm-slim"
BUILT = f"{PREFIX}/debian:latest"
PULL_S = 45.0  # seconds a pull of 30 MB may take before the archive is the quicker way
MMDEBSTRAP = ("mmdebstrap", "--variant=apt", "--include=ca-certificates", '--customize-hook=rm -f "$1/etc/resolv.conf" "$1/etc/hostname"')
FIELDS = "$(REPO_URI)|$(CODENAME)|$(COMPONENT)"  # of apt-get indextargets: one line for each list of packages


async def base_image(tools: Tools, store: Store, asked: str | None, say: Callable[[str], None]) -> str:
    """The reference of an image to build on, in the store."""
    if asked is not None:
        await _fetch(tools, asked, say)
        return asked
    for known in (BUILT, PUBLIC):
        if await tools.succeeds("image", "exists", known):
            return known
    if await _pulled(tools, say):
        return PUBLIC
    await _build(tools, store, say)
    return BUILT


async def _fetch(tools: Tools, asked: str, say: Callable[[str], None]) -> None:
    if await tools.succeeds("image", "exists", asked):
        return
    say(f"pulling {asked}")
    await tools.do(f"pulling {asked}", "pull", "--quiet", asked)


async def _pulled(tools: Tools, say: Callable[[str], None]) -> bool:
    """Whether the public image could be had, quickly."""
    with trio.move_on_after(PULL_S):
        try:
            await tools.do(f"pulling {PUBLIC}", "pull", "--quiet", PUBLIC)
        except RuntimeFault:
            say(f"no registry gives {PUBLIC}")
            return False
        say(f"pulled {PUBLIC}")
        return True
    say(f"no registry gave {PUBLIC} within {PULL_S:.0f} s")
    return False


async def _build(tools: Tools, store: Store, say: Callable[[str], None]) -> None:
    if shutil.which("mmdebstrap", path=store.environment()["PATH"]) is None:
        raise RuntimeFault("no Debian to build images on: apt-get install mmdebstrap, or give --base-image one that can be pulled")
    suite, lines = await _archive(tools)
    say(f"building a {suite} base from this machine's Debian archive (half a minute, minutes on a busy machine)")
    tar = store.state_dir / "tmp" / "debian.tar"
    try:
        await tools.run("building a Debian base", [*MMDEBSTRAP, suite, str(tar), *lines])
        await tools.do("importing the Debian base", "import", "--quiet", "--change", 'CMD=["bash"]', str(tar), BUILT)
    finally:
        tar.unlink(missing_ok=True)
    say(f"built {BUILT}")


async def _archive(tools: Tools) -> tuple[str, list[str]]:
    """This machine's suite, and its archive as lines of a sources.list; third parties' archives are left out."""
    suite = _codename()
    with boundary(RuntimeFault, "apt does not say where this machine's packages come from"):
        told = await trio.run_process(
            ["apt-get", "indextargets", "--format", FIELDS, "Created-By: Packages"], capture_stdout=True, env=tools.store.environment()
        )
    return suite, archive_lines(told.stdout.decode(), suite)


def archive_lines(told: str, suite: str) -> list[str]:
    """What apt says of its indexes, as lines of a sources.list for a suite and its updates, the suite itself first."""
    rows = [line.split("|") for line in told.splitlines()]
    lines = {f"deb {uri} {codename} {component}" for uri, codename, component in rows if codename.split("-")[0] == suite}
    return sorted(lines, key=lambda line: (f" {suite} " not in line, line))


def _codename() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.partition("=")[2].strip('"')
    raise RuntimeFault("this machine is no Debian or Ubuntu, so it can not build a base: give --base-image a Debian image that can be pulled")
