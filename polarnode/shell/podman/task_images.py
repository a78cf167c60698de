"""Images of tasks: built from the environment folder of a task, by the operator, on the node's own machine.

The rule for whoever edits it: such a folder is somebody else's program, and building it runs that program with this machine's network. It is
done only at a person's word (`polarnode run`, `submit`, `convert --build`), never because a task that came over the network asks for it.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import trio

from polarnode.errors import RuntimeFault
from polarnode.shell.podman.images import CERTIFICATES, CONFINED, Builder, open_builder
from polarnode.shell.podman.settings import RuntimesSettings
from polarnode.sources import Build


async def build_task_images(settings: RuntimesSettings, builds: Iterable[Build], *, log: Path, say: Callable[[str], None]) -> None:
    """See that the images of these folders are there; what is built already, by the digest of its folder, is not built again.

    Raises RuntimeFault with the build's last words.
    """
    wanted = {build.image: build for build in builds}
    if not wanted:
        return
    builder = await open_builder(settings, log, say)
    for build in [build for build in wanted.values() if not await builder.exists(build.image)]:
        async with builder.building():
            if not await builder.exists(build.image):
                say(f"building {build.image} from {build.folder}")
                with trio.move_on_after(build.limit_s) as clock:
                    await _build(builder, build)
                if clock.cancelled_caught:
                    raise RuntimeFault(f"building {build.folder} did not end within its {build.limit_s:g} s, see {log}")


async def _build(builder: Builder, build: Build) -> None:
    """Build; where that fails, once more with this machine's certificates, which a machine behind a proxy of its own can not do without.

    Not at once with them: they would lie where a build that installs a distribution's own certificates has to write, and fail it.
    """
    what, flags = f"building {build.folder}", ("--file", str(build.folder / build.containerfile), "--tag", build.image, *CONFINED, "--pull=missing")
    try:
        await builder.tools.do(what, "build", *flags, str(build.folder))
    except RuntimeFault as first:
        if not CERTIFICATES.exists():
            raise
        builder.say(f"{build.folder} did not build; once more with this machine's certificates")
        try:
            await builder.tools.do(what, "build", *flags, "--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro", str(build.folder))
        except RuntimeFault:
            raise first from None
