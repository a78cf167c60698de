"""Images: what is missing or of another recipe is built, once, however many nodes and sessions ask.

Built with the podman command line, because podman-py can not mount the machine's own certificates into a build. Rule for whoever edits it:
a build may reach the network, a container never; nothing of this machine but its certificates enters an image, and those only for a step.
"""

import fcntl
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from attrs import define, field

from polarnode.errors import Refused, RuntimeFault
from polarnode.shell.podman.conf import write_configuration
from polarnode.shell.podman.probe import probe
from polarnode.shell.podman.recipes import CONTAINERFILE, Recipe, Recipes, default_runtimes_dir, read_recipes
from polarnode.shell.podman.rootfs import base_image
from polarnode.shell.podman.store import Store, default_state_dir, make_folders, store_at
from polarnode.shell.podman.tools import Tools

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
RECIPE_LABEL = "polarnode.recipe"
LOCK_POLL = 0.5  # seconds between looks at another node's build; a build takes minutes


@define(eq=False)
class ImageBuilder:
    """Builds recipes and knows what is built. One for a node; `ensure` may be called by many sessions at once."""

    recipes: Recipes
    store: Store
    tools: Tools
    base: str | None
    say: Callable[[str], None]
    _known: set[str] = field(factory=set, init=False)
    _one_at_a_time: trio.Lock = field(factory=trio.Lock, init=False)

    async def ensure(self, names: Iterable[str]) -> None:
        """See that the images of these names are there, building what a recipe can. Raises RuntimeFault with the build's last words, and
        Refused for a name that is neither a recipe nor an image of this store."""
        wanted = sorted(set(names) - self._known)
        if not wanted:
            return
        async with self._one_at_a_time:
            await self._build_missing(self.recipes.with_bases(wanted))
            for name in wanted:
                await self._check_foreign(name)
            self._known.update(wanted)

    async def _build_missing(self, ordered: Sequence[Recipe]) -> None:
        if not await self._missing(ordered):
            return
        async with _one_builder(self.store, self.say):
            for recipe in await self._missing(ordered):  # asked again: another node may have built them while we waited
                await self._build(recipe)

    async def _missing(self, ordered: Sequence[Recipe]) -> list[Recipe]:
        told = await self.tools.ask("images", "--filter", f"label={RECIPE_LABEL}", "--format", "json")
        built = {(name, image["Labels"][RECIPE_LABEL]) for image in json.loads(told or "[]") for name in image.get("Names") or ()}
        return [recipe for recipe in ordered if (recipe.image, recipe.digest) not in built]

    async def _build(self, recipe: Recipe) -> None:
        started = time.monotonic()
        below = self.recipes.by_name[recipe.told.base].image if recipe.told.base else await base_image(self.tools, self.store, self.base, self.say)
        self.say(f"building runtime {recipe.name} on {below}")
        await self.tools.do(f"building runtime {recipe.name}", "build", *_build_flags(recipe, below), str(recipe.folder))
        self.say(f"built runtime {recipe.name} in {time.monotonic() - started:.0f} s")

    async def _check_foreign(self, name: str) -> None:
        if self.recipes.find(name) is None and not await self.tools.succeeds("image", "exists", name):
            known = ", ".join(sorted(self.recipes.by_name))
            how = f"{' '.join(self.tools.prefix())} pull {name}"
            raise Refused(f"no image is called {name}; there are recipes for {known}; other images are fetched with: {how}", path="$.runtime.image")


async def open_builder(*, runtimes_dir: Path | None, state_dir: Path | None, base: str | None, log: Path, say: Callable[[str], None]) -> ImageBuilder:
    """A builder on a probed and configured store; raises RuntimeFault with the remedies where the machine lacks something."""
    store = store_at(state_dir or default_state_dir())
    findings = await probe(store.state_dir)
    if findings.podman is None or not findings.ok:
        raise RuntimeFault(f"containers can not run here: {findings.faults()}")
    make_folders(store)
    write_configuration(store, findings)
    recipes = read_recipes(runtimes_dir or default_runtimes_dir(), base=base)
    return ImageBuilder(recipes=recipes, store=store, tools=Tools(podman=findings.podman, store=store, log=log), base=base, say=say)


async def ensure_images(
    runtimes_dir: Path | None, names: Iterable[str], *, base: str | None, state_dir: Path | None, log: Path, say: Callable[[str], None]
) -> None:
    """Build what is missing among these recipes, or whose recipe changed; `say` is told each step, `log` takes the builds' output."""
    builder = await open_builder(runtimes_dir=runtimes_dir, state_dir=state_dir, base=base, log=log, say=say)
    await builder.ensure(names)


def _build_flags(recipe: Recipe, below: str) -> list[str]:
    flags = ["--file", CONTAINERFILE, "--tag", recipe.image, "--build-arg", f"BASE={below}", "--label", f"{RECIPE_LABEL}={recipe.digest}"]
    flags += ["--network", "host", "--force-rm", "--pull=never"]  # the host's network spares a bridge and its firewall rules
    if recipe.told.base is not None and CERTIFICATES.exists():  # a base has no certificates yet, and installs its own at this very path
        flags += ["--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro"]
    return flags


@asynccontextmanager
async def _one_builder(store: Store, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Hold the store's build lock: two nodes on one store build one after the other. It is free again when its holder dies."""
    held = os.open(store.state_dir / "build.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await _wait_locked(held, say)
        yield
    finally:
        os.close(held)


async def _wait_locked(held: int, say: Callable[[str], None]) -> None:
    told = False
    while not _locked(held):
        if not told:
            say("waiting for another node that builds images")
            told = True
        await trio.sleep(LOCK_POLL)


def _locked(held: int) -> bool:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
