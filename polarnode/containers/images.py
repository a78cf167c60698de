"""Build images that are missing or outdated, once, however many nodes and sessions ask for them.

Images are built with the podman command line, because podman-py cannot mount the machine's own certificates
into a build. Invariant: a build may reach the network, a container never; nothing of this machine but its
certificates enters an image, and these only during a step.

Images of tasks are built from a task's environment folder. Such a folder is untrusted code, and building it
runs that code with this machine's network. Images are built only at an operator's command (`polarnode run`,
`submit`, `convert --build`), never because a task that came over the network requests it.
"""

import fcntl
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from weakref import WeakValueDictionary

import trio
from attrs import define, field, frozen

from polarnode.containers.probe import Store
from polarnode.containers.recipes import (
    CONTAINERFILE,
    ON,
    ImageRecipes,
    PodmanTools,
    Recipe,
    RuntimesSettings,
    Stage,
    base_image,
    default_runtimes_dir,
    read_recipes,
)
from polarnode.containers.service import configure_store
from polarnode.core.errors import Refused, RuntimeFault
from polarnode.sources.values import ImageBuild
from polarnode.support.bounded import remember

# ── images ────────────────────────────────────────────────────────────────────

CERTIFICATES_PATH = Path("/etc/ssl/certs/ca-certificates.crt")
RECIPE_LABEL = "polarnode.recipe"
# This label has the id of the image under a stage, because a task's image may change under its name.
BELOW_LABEL = "polarnode.below"
# Images that no other image needs are removed at this age: builders, which speed up the next recipe, and
# replaced images.
LAYERS_KEPT = "24h"
# The host's network makes a bridge and its firewall rules unnecessary. With this isolation all processes of a
# build are in our process group, and end with it.
CONFINEMENT_FLAGS = ("--network", "host", "--force-rm", "--isolation", "chroot")
LOCK_POLL_S = 0.5  # seconds between checks of another node's build; a build takes minutes
# The most concurrent checks of images. 500 sessions that each started their own took half a minute of both
# cores.
MAX_CHECKS = 4
# An answer about a task's image is valid for these seconds. An image that exists is not looked for at every
# task of a dataset, and an image that was just pulled is not refused for long.
FOUND_VALID_S, MISSED_S = 60.0, 1.0
MAX_ANSWERS = 4096  # remembered names of tasks' images: more than the datasets of one run have


@define(eq=False, kw_only=True)
class Images:
    """Provides the images of one node. `ensure` may be called by many sessions at once; `report` gets a line
    for each step that takes time.
    """

    settings: RuntimesSettings
    log: Path
    report: Callable[[str], None]
    _available: set[str] = field(factory=set, init=False)
    _step: tuple[str, float] | None = field(default=None, init=False)  # the current build step and its start
    _builder: "Builder | None" = field(default=None, init=False)
    _opening: trio.Lock = field(factory=trio.Lock, init=False)
    _one_at_a_time: trio.Lock = field(factory=trio.Lock, init=False)
    # By name of the image: hundreds of sessions need one image at once, and one check is enough.
    _locks: dict[str, trio.Lock] = field(factory=dict, init=False)
    _checks: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(MAX_CHECKS), init=False)
    # The sentence about a missing image, None for one that exists, and until when that is valid.
    _answers: dict[str, tuple[str | None, float]] = field(factory=dict, init=False)
    _asking: "WeakValueDictionary[str, trio.Lock]" = field(factory=WeakValueDictionary, init=False)

    @property
    def step(self) -> str | None:
        """The current build step with its seconds so far, as in `building mini_swe_agent, 60 s`."""
        if self._step is None:
            return None
        text, began = self._step
        return f"{text}, {trio.current_time() - began:.0f} s"

    def _report(self, text: str) -> None:
        self.report(text)
        if text.startswith(("building ", "pulling ", "waiting ")):
            self._step = (
                text.replace("building runtime ", "building ").partition(" on ")[0],
                trio.current_time(),
            )

    async def refusal(self, name: str) -> str | None:
        """Why a task cannot have the image of that name: it is neither a recipe nor an image of this store.
        None where it can. Podman is asked once for each name, and again when the answer is old.
        """
        async with self._asking.setdefault(name, trio.Lock()):
            why, until = self._answers.get(name, (None, 0.0))
            if name in self._available or trio.current_time() < until:
                return why
            builder = await self._opened()
            async with self._checks:
                why = await builder.refusal(name)
            until = trio.current_time() + (FOUND_VALID_S if why is None else MISSED_S)
            remember(self._answers, name, (why, until), most=MAX_ANSWERS)
            return why

    async def ensure(self, name: str) -> None:
        """Make sure that the image of that name exists, building it if a recipe can. Raises RuntimeFault with
        the end of the build's log, and Refused for a name that is neither a recipe nor an image of this
        store.
        """
        if name in self._available:
            return
        async with self._locks.setdefault(name, trio.Lock()):
            if name not in self._available:
                await self._ensure_locked(name)
                self._available.add(name)

    async def _ensure_locked(self, name: str) -> None:
        builder = await self._opened()
        # The check runs beside builds, so that a session whose image exists does not wait for another's
        # build.
        async with self._checks:
            stands = await builder.stands(name)
        if not stands:
            async with self._one_at_a_time:
                try:
                    await builder.build_missing(name)
                finally:
                    self._step = None

    async def _opened(self) -> "Builder":
        async with self._opening:
            if self._builder is None:
                self._builder = await open_builder(self.settings, self.log, self._report)
            return self._builder


async def ensure_images(
    settings: RuntimesSettings, names: Iterable[str], *, log: Path, report: Callable[[str], None]
) -> None:
    """Make sure that the images of these names exist, without a node; as `Images.ensure`."""
    images = Images(settings=settings, log=log, report=report)
    for name in names:
        await images.ensure(name)


@frozen(kw_only=True)
class Builder:
    """A configured store, and the recipes to build in it."""

    recipes: ImageRecipes
    store: Store
    tools: PodmanTools
    base: str | None
    report: Callable[[str], None]

    async def stands(self, name: str) -> bool:
        """Whether nothing needs to be built for a name."""
        if ON in name:
            return await self._stages_current(self.recipes.stages(name))
        ordered = self.recipes.with_bases([name])
        return not await self._missing(ordered) if ordered else await self.exists(name)

    async def build_missing(self, name: str) -> None:
        if ON in name:
            await self._build_on_top(name)
            return
        ordered = self.recipes.with_bases([name])
        if not ordered:
            await self._check_foreign(name)
        elif await self._missing(ordered):
            async with self.hold_build_lock():
                # They are checked again, because another node may have built them while this one waited.
                for recipe in await self._missing(ordered):
                    await self._build(recipe)

    @asynccontextmanager
    async def hold_build_lock(self) -> AsyncIterator[None]:
        """Hold the store's build lock for the block. At its end, old layers that no image needs are
        removed.
        """
        async with _build_lock(self.store, self.report):
            await self._remove_unfinished()
            yield
            try:
                await self.tools.run_podman(
                    "removing old layers", "image", "prune", "--force", "--filter", f"until={LAYERS_KEPT}"
                )
            except RuntimeFault as fault:
                # Other processes remove images too. The built images exist, and the next build removes the
                # rest.
                self.report(f"old layers stay for now: {fault}")

    async def _build_on_top(self, name: str) -> None:
        below, stages = name.partition(ON)[2], self.recipes.stages(name)
        await self.build_missing(below)
        if await self._stages_current(stages):
            return
        async with self.hold_build_lock():
            for stage in stages:
                if not await self._stage_current(stage):
                    await self._build_stage(stage, below)

    async def _stages_current(self, stages: Sequence[Stage]) -> bool:
        for stage in stages:
            if not await self._stage_current(stage):
                return False
        return True

    async def _stage_current(self, stage: Stage) -> bool:
        return await self._is_labelled(
            stage.image, {RECIPE_LABEL: stage.recipe.digest, BELOW_LABEL: await self._id(stage.below)}
        )

    async def _build_stage(self, stage: Stage, task_image: str) -> None:
        started = trio.current_time()
        self.report(f"building {stage.recipe.name} on the task's image {task_image}")
        flags = [
            *_build_flags(stage.recipe, stage.below, tag=stage.image),
            "--label",
            f"{BELOW_LABEL}={await self._id(stage.below)}",
        ]
        await self.tools.run_podman(
            f"building {stage.recipe.name} on {task_image}", "build", *flags, str(stage.recipe.folder)
        )
        self.report(f"built {stage.recipe.name} on {task_image} in {trio.current_time() - started:.0f} s")

    async def _id(self, image: str) -> str:
        return (
            (await self.tools.output("image", "inspect", "--format", "{{.Id}}", image)).strip()
            if await self.exists(image)
            else ""
        )

    async def exists(self, image: str) -> bool:
        return await self.tools.command_succeeds("image", "exists", image)

    async def _missing(self, ordered: Sequence[Recipe]) -> list[Recipe]:
        return [
            recipe
            for recipe in ordered
            if not await self._is_labelled(recipe.image, {RECIPE_LABEL: recipe.digest})
        ]

    async def _is_labelled(self, image: str, labels: Mapping[str, str]) -> bool:
        """Whether the image has these labels. Only this image is inspected, because a listing of all images
        fails whenever another process removes one of them meanwhile.
        """
        if not await self.exists(image):
            return False
        found = (
            json.loads(await self.tools.output("image", "inspect", "--format", "{{json .Labels}}", image))
            or {}
        )
        return all(found.get(name) == value for name, value in labels.items())

    async def _build(self, recipe: Recipe) -> None:
        started = trio.current_time()
        below = (
            self.recipes.by_name[recipe.config.base].image
            if recipe.config.base
            else await base_image(self.tools, self.store, self.base, self.report)
        )
        self.report(f"building runtime {recipe.name} on {below}")
        await self.tools.run_podman(
            f"building runtime {recipe.name}",
            "build",
            *_build_flags(recipe, below, tag=recipe.image),
            str(recipe.folder),
        )
        self.report(f"built runtime {recipe.name} in {trio.current_time() - started:.0f} s")

    async def _remove_unfinished(self) -> None:
        """Remove what killed builds left in the store. The build lock is held, so none of it belongs to a
        running build.
        """
        listed = json.loads(await self.tools.output("ps", "--all", "--external", "--format", "json") or "[]")
        for container in listed:
            if container["State"] == "storage" and not await self.tools.command_succeeds(
                "rm", "--force", container["Id"]
            ):
                self.report(f"container {container['Id'][:12]}, left by a build, could not be removed")

    async def refusal(self, name: str) -> str | None:
        """Why no container can have the image of that name: it is neither a recipe nor an image of this
        store. None if one can, and if Podman gives no answer.
        """
        if self.recipes.find(name) is not None or not await self.tools.command_denies(
            "image", "exists", name
        ):
            return None
        recipes = ", ".join(sorted(self.recipes.by_name))
        if name.startswith("localhost/"):  # Podman's own word for images no registry gave
            how = f"one of your own is built with: polarnode image build DIR --tag {name}"
        else:
            how = f"other images are fetched with: {' '.join(self.tools.prefix())} pull {name}"
        return f"no image is called {name}; there are recipes for {recipes}; {how}"

    async def _check_foreign(self, name: str) -> None:
        if (why := await self.refusal(name)) is not None:
            raise Refused(why, path="$.runtime.image")


async def open_builder(settings: RuntimesSettings, log: Path, report: Callable[[str], None]) -> Builder:
    ready = await configure_store(settings.state_dir, settings.limits)
    recipes = read_recipes(settings.runtimes_dir or default_runtimes_dir(), base=settings.base_image)
    tools = PodmanTools(podman=ready.podman, store=ready.store, log=log)
    return Builder(recipes=recipes, store=ready.store, tools=tools, base=settings.base_image, report=report)


def _build_flags(recipe: Recipe, below: str, *, tag: str) -> list[str]:
    flags = [
        "--file",
        CONTAINERFILE,
        "--tag",
        tag,
        "--build-arg",
        f"BASE={below}",
        "--label",
        f"{RECIPE_LABEL}={recipe.digest}",
    ]
    flags += [*CONFINEMENT_FLAGS, "--pull=never"]
    # A base has no certificates yet, and installs its own at this very path.
    if recipe.config.base is not None and CERTIFICATES_PATH.exists():
        flags += ["--volume", f"{CERTIFICATES_PATH}:{CERTIFICATES_PATH}:ro"]
    return flags


@asynccontextmanager
async def _build_lock(store: Store, report: Callable[[str], None]) -> AsyncIterator[None]:
    """Hold the store's build lock, so that two nodes on one store build one after the other. It is released
    when its holder dies.
    """
    held = os.open(store.state_dir / "build.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        reported = False
        while not _locked(held):
            if not reported:
                report("waiting for another node that builds images")
                reported = True
            await trio.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(held)


def _locked(held: int) -> bool:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# ── images of tasks ───────────────────────────────────────────────────────────


async def build_task_images(
    settings: RuntimesSettings,
    builds: Iterable[ImageBuild],
    *,
    log: Path,
    report: Callable[[str], None],
    again: bool = False,
) -> None:
    """Build the images of these folders. An image that exists, by the digest of its folder, is not built
    again unless `again` is set.

    Raises RuntimeFault with the end of the build's log, and Refused for the name of a recipe.
    """
    by_image = {build.image: build for build in builds}
    if not by_image:
        return
    builder = await open_builder(settings, log, report)
    for build in by_image.values():
        if builder.recipes.find(build.image) is not None:
            raise Refused(
                f"{build.image} is one of polarnode's own images: choose another name, as in mine/agent"
            )
    for build in [each for each in by_image.values() if again or not await builder.exists(each.image)]:
        async with builder.hold_build_lock():
            if again or not await builder.exists(build.image):
                report(f"building {build.image} from {build.folder}")
                with trio.move_on_after(build.limit_s) as clock:
                    await _build(builder, build)
                if clock.cancelled_caught:
                    raise RuntimeFault(
                        f"building {build.folder} did not end within its {build.limit_s:g} s, see {log}"
                    )


async def _build(builder: Builder, build: ImageBuild) -> None:
    """Build an image. If that fails, try once more with this machine's certificates, which a machine behind a
    proxy of its own needs.

    The first try is without the certificates. If they are mounted, they are where a build that installs a
    distribution's own certificates has to write, and such a build fails.
    """
    what, flags = (
        f"building {build.folder}",
        (
            "--file",
            str(build.folder / build.containerfile),
            "--tag",
            build.image,
            *CONFINEMENT_FLAGS,
            "--pull=missing",
        ),
    )
    try:
        await builder.tools.run_podman(what, "build", *flags, str(build.folder))
    except RuntimeFault as first:
        if not CERTIFICATES_PATH.exists():  # noqa: ASYNC240 - one stat
            raise
        builder.report(f"{build.folder} did not build; once more with this machine's certificates")
        try:
            await builder.tools.run_podman(
                what,
                "build",
                *flags,
                "--volume",
                f"{CERTIFICATES_PATH}:{CERTIFICATES_PATH}:ro",
                str(build.folder),
            )
        except RuntimeFault:
            raise first from None
