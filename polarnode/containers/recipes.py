"""Settings of the runtimes, the recipes of `runtimes/`, and the base image they stand on.

A recipe is one folder of `runtimes/`. Its digest covers its files, its base's digest and the configured base
image, so that a change in a base rebuilds everything on top of it; a built image is labelled with the digest.
A harness can be put on top of a task's own image. Then its recipes are built one upon the other on that
image, and the resulting images are named after the task's image and all these recipes.

The base is the configured image, else a public Debian image that can be pulled, else one that is built from
this machine's own archive; the choice is reported. Nothing here names a host: the public image is requested
by its short name, which the machine's own registries.conf may resolve, and the archive is the one that this
machine's apt uses.
"""

import hashlib
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import trio
from attrs import field, frozen

from polarnode.containers.probe import Store
from polarnode.containers.user_namespace import Limits
from polarnode.core import codec
from polarnode.core.errors import ConfigError, Refused, RuntimeFault, boundary
from polarnode.support.bounded import open_private
from polarnode.support.concurrency import open_process_group

# ── settings ──────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class RuntimesSettings:
    """The settings of a node's runtimes. `state_dir` may be shared by nodes; `node_id` is on every
    container's label. `runtimes_dir` None means polarnode's own recipes.
    """

    state_dir: Path
    node_id: str
    runtimes_dir: Path | None = None
    # A Debian image to build on. None means one that can be pulled, else one built from this machine's
    # archive.
    base_image: str | None = None
    # The most started containers that are kept of one shape: as many as INIT and READY hold. They take about
    # 1 MB each, and are kept only while sessions are expected.
    warm: int = 8
    prepared: int = 32  # prepared workspaces kept as images
    # Concurrent calls to Podman. On two cores more than 4-8 only wait for each other (3.6 lifecycles/s at 8,
    # 2.0 at 32).
    calls: int = 6
    volumes: tuple[str, ...] = ()  # folders below which tasks may mount
    limits: Limits = "enforced"  # whether the node starts on a machine that does not enforce all limits
    # MiB that are to stay free on the disk of the containers. When half of it is left, the largest is ended.
    disk_reserve_mb: int = 4096


# ── the podman program ────────────────────────────────────────────────────────

LAST_WORDS = 1500  # bytes of a failed build's log in its error: enough for the error line


@frozen(kw_only=True)
class PodmanTools:
    """The podman program and image builders on one store, never on the machine's own."""

    podman: Path
    store: Store
    log: Path

    def prefix(self) -> list[str]:
        """The words of a shell command line that reach this store."""
        own = self.store.environment()
        return [
            "env",
            *(f"{name}={own[name]}" for name in ("CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF")),
            "podman",
        ]

    async def output(self, *arguments: str) -> str:
        """Run a short command and return its output. Raises RuntimeFault with its error text."""
        done = await trio.run_process(
            [self.podman, *arguments],
            env=self.store.environment(),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeFault(f"podman {arguments[0]}: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout.decode()

    async def command_succeeds(self, *arguments: str) -> bool:
        """Whether a short command exits with 0."""
        return await self._exit_code(arguments) == 0

    async def command_denies(self, *arguments: str) -> bool:
        """Whether a short command exits with 1, which means no. Other codes but 0 are faults of Podman."""
        return await self._exit_code(arguments) == 1

    async def _exit_code(self, arguments: Sequence[str]) -> int:
        env = self.store.environment()
        done = await trio.run_process(
            [self.podman, *arguments],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        return done.returncode

    async def run_podman(self, what: str, *arguments: str) -> None:
        """Run a long podman command, its output in the log. Raises RuntimeFault with the log's end."""
        await self.run(what, [str(self.podman), *arguments])

    async def run(self, what: str, argv: Sequence[str]) -> None:
        """Run a long program, its output in the log. On cancellation it is ended with everything it
        started.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab", opener=open_private) as sink:  # noqa: ASYNC230 - a local file
            sink.write(f"\n$ {' '.join(argv)}\n".encode())  # noqa: ASYNC232 - a line of a local file
            sink.flush()  # noqa: ASYNC232
            started = sink.tell()  # noqa: ASYNC232
            with boundary(RuntimeFault, what):
                async with open_process_group(argv, env=self.store.environment(), stdout=sink) as process:
                    exit_code = await process.wait()
        if exit_code != 0:
            raise RuntimeFault(
                f"{what} failed with exit code {exit_code}, see {self.log}: {self._last_words(started)}"
            )

    def _last_words(self, started: int) -> str:
        with self.log.open("rb") as log:
            end = log.seek(0, 2)
            log.seek(max(started, end - LAST_WORDS))
            return log.read().decode(errors="replace").strip()


# ── recipes ───────────────────────────────────────────────────────────────────

PREFIX = "localhost/polarnode"  # Podman's own word for images no registry gave
CONTAINERFILE = "Containerfile"
# Stands between a harness's image and the task's image below it. No task can write such a name, because no
# image's name has this character.
ON = "+"


@frozen(kw_only=True)
class RecipeConfig:
    """The content of a runtime.toml. `base` is another recipe's name, None for a recipe directly on Debian.
    User and workdir come from the task.

    `instead_of` is the recipe that this one replaces on a task's own image. `harnesses` tells readers which
    harnesses the image has; a harness itself names the image in which it runs (`Harness.image`).
    """

    base: str | None = None
    instead_of: str | None = None
    harnesses: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


@frozen(kw_only=True)
class Recipe:
    """One folder of `runtimes/`: its config, and the digest of everything that determines its image."""

    name: str
    folder: Path
    digest: str
    config: RecipeConfig

    @property
    def image(self) -> str:
        return f"{PREFIX}/{self.name}:latest"


@frozen(kw_only=True)
class Stage:
    """One build step on top of a task's own image: the recipe, the image under it, and the resulting name."""

    recipe: Recipe
    below: str
    image: str


def on_top_image(harness_image: str, image: str) -> str:
    """The name of the image that has a harness's recipe on top of a task's own image."""
    return f"{harness_image}{ON}{image}"


@frozen(kw_only=True)
class ImageRecipes:
    """All recipes, by name."""

    by_name: Mapping[str, Recipe] = field(factory=dict)

    def find(self, name: str) -> Recipe | None:
        """The recipe of that name or alias; None where there is none."""
        found = self.by_name.get(name)
        return found or next(
            (recipe for recipe in self.by_name.values() if name in recipe.config.aliases), None
        )

    def image(self, name: str) -> str:
        """Podman's name of an image: a recipe's own image, the image of a harness `on_top_image` of another,
        or the name unchanged.
        """
        if ON in name:
            return self.stages(name)[-1].image
        recipe = self.find(name)
        return recipe.image if recipe else name

    def with_bases(self, names: Sequence[str]) -> tuple[Recipe, ...]:
        """The recipes of these names and all their bases, each once and after its base. Names without a
        recipe are left out.
        """
        ordered: dict[str, Recipe] = {}
        for name in names:
            for recipe in reversed(tuple(self._recipe_and_bases(name))):
                ordered.setdefault(recipe.name, recipe)
        return tuple(ordered.values())

    def stages(self, name: str) -> tuple[Stage, ...]:
        """The stages that are built for a name made by `on_top_image`, each after its base. Raises Refused if
        the harness's image is no recipe.
        """
        harness, _, below = name.partition(ON)
        made: list[Stage] = []
        running = hashlib.sha256(self.image(below).encode())
        for recipe in map(self._recipe_on_top, self.with_bases([harness])):
            running.update(recipe.digest.encode())
            stands_on = made[-1].image if made else self.image(below)
            made.append(
                Stage(
                    recipe=recipe,
                    below=stands_on,
                    image=f"{PREFIX}/{recipe.name}-on:{running.hexdigest()[:24]}",
                )
            )
        if not made:
            raise Refused(
                f"{harness} is no recipe: a harness is put on a task's image by its folder of runtimes/",
                path="$.runtime.add_harness",
            )
        return tuple(made)

    def _recipe_on_top(self, recipe: Recipe) -> Recipe:
        return next(
            (other for other in self.by_name.values() if other.config.instead_of == recipe.name), recipe
        )

    def _recipe_and_bases(self, name: str) -> Iterator[Recipe]:
        recipe = self.find(name)
        while recipe is not None:
            yield recipe
            recipe = self.by_name[recipe.config.base] if recipe.config.base else None


def default_runtimes_dir() -> Path:
    """polarnode's own recipes: `runtimes/` inside an installed package, beside the package in a checkout.
    Raises ConfigError where there are none.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "runtimes", package.parent / "runtimes"):
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"no image recipes in {package / 'runtimes'} or beside the package: install polarnode again, or set"
        " runtimes_dir to a folder of image recipes"
    )


def read_recipes(runtimes_dir: Path, *, base: str | None = None) -> ImageRecipes:
    """Read every folder with a runtime.toml. `base` is the configured base image, which is part of each
    digest.
    """
    configs = {path.parent.name: _read_config(path) for path in sorted(runtimes_dir.glob("*/runtime.toml"))}
    if not configs:
        raise ConfigError(
            f"no runtime.toml in the folders of {runtimes_dir}: set runtimes_dir to a folder of image recipes"
        )
    made: dict[str, Recipe] = {}
    for name in configs:
        _make_recipe(name, configs, made, runtimes_dir, base, ())
    return ImageRecipes(by_name=made)


def _make_recipe(
    name: str,
    configs: Mapping[str, RecipeConfig],
    made: dict[str, Recipe],
    folder: Path,
    base: str | None,
    above: tuple[str, ...],
) -> Recipe:
    if name in made:
        return made[name]
    if name in above or name not in configs:
        raise ConfigError(
            f"{above[-1]}/runtime.toml: base {name} is {'its own base' if name in above else 'no recipe'}"
        )
    config = configs[name]
    below = (
        _make_recipe(config.base, configs, made, folder, base, (*above, name)).digest
        if config.base
        else f"on {base or 'debian'}"
    )
    made[name] = Recipe(name=name, folder=folder / name, digest=_digest(folder / name, below), config=config)
    return made[name]


def _read_config(path: Path) -> RecipeConfig:
    try:
        return codec.structure(tomllib.loads(path.read_text()), RecipeConfig, forbid_extra=True)
    except (Refused, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path.parent.name}/runtime.toml: {error}") from error


def _digest(folder: Path, below: str) -> str:
    running = hashlib.sha256(below.encode())
    for path in sorted(folder.rglob("*")):
        # Python writes __pycache__ beside what pip installs, and the same recipe in a checkout has none.
        if path.is_file() and path.name != "runtime.toml" and "__pycache__" not in path.parts:
            running.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return running.hexdigest()[:24]


# ── the base image ────────────────────────────────────────────────────────────

PUBLIC = "debian:bookworm-slim"
BUILT_BASE = f"{PREFIX}/debian:latest"
PULL_S = 45.0  # seconds a pull of 30 MB may take before the archive is the quicker way
MMDEBSTRAP = (
    "mmdebstrap",
    "--variant=apt",
    "--include=ca-certificates",
    '--customize-hook=rm -f "$1/etc/resolv.conf" "$1/etc/hostname"',
)
# The format of apt-get indextargets, which prints one line for each list of packages.
FIELDS = "$(REPO_URI)|$(CODENAME)|$(COMPONENT)"


async def base_image(
    tools: PodmanTools, store: Store, configured: str | None, report: Callable[[str], None]
) -> str:
    """The name of an image to build on, which is in the store afterwards."""
    if configured is not None:
        if not await tools.command_succeeds("image", "exists", configured):
            report(f"pulling {configured}")
            await tools.run_podman(f"pulling {configured}", "pull", "--quiet", configured)
        return configured
    for image in (BUILT_BASE, PUBLIC):
        if await tools.command_succeeds("image", "exists", image):
            return image
    if await _pull_public(tools, report):
        return PUBLIC
    await _build(tools, store, report)
    return BUILT_BASE


async def _pull_public(tools: PodmanTools, report: Callable[[str], None]) -> bool:
    """Whether the public image could be pulled within PULL_S."""
    with trio.move_on_after(PULL_S):
        try:
            await tools.run_podman(f"pulling {PUBLIC}", "pull", "--quiet", PUBLIC)
        except RuntimeFault:
            report(f"no registry gives {PUBLIC}")
            return False
        report(f"pulled {PUBLIC}")
        return True
    report(f"no registry gave {PUBLIC} within {PULL_S:.0f} s")
    return False


async def _build(tools: PodmanTools, store: Store, report: Callable[[str], None]) -> None:
    if shutil.which("mmdebstrap", path=store.environment()["PATH"]) is None:
        raise RuntimeFault(
            "no Debian to build images on: apt-get install mmdebstrap, or give --base-image one that can be"
            " pulled"
        )
    suite, lines = await _machine_archive(tools)
    report(
        f"building a {suite} base from this machine's Debian archive (half a minute, minutes on a busy"
        " machine)"
    )
    tar = store.state_dir / "tmp" / "debian.tar"
    try:
        await tools.run("building a Debian base", [*MMDEBSTRAP, suite, str(tar), *lines])
        await tools.run_podman(
            "importing the Debian base", "import", "--quiet", "--change", 'CMD=["bash"]', str(tar), BUILT_BASE
        )
    finally:
        tar.unlink(missing_ok=True)
    report(f"built {BUILT_BASE}")


async def _machine_archive(tools: PodmanTools) -> tuple[str, list[str]]:
    """The machine's Debian suite, and its archive as lines of a sources.list, without archives of others."""
    suite = _debian_codename()
    with boundary(RuntimeFault, "apt does not report where this machine's packages come from"):
        listed = await trio.run_process(
            ["apt-get", "indextargets", "--format", FIELDS, "Created-By: Packages"],
            capture_stdout=True,
            env=tools.store.environment(),
        )
    return suite, archive_lines(listed.stdout.decode(), suite)


def archive_lines(listing: str, suite: str) -> list[str]:
    """Turn apt's list of indexes into lines of a sources.list for a suite and its updates, the suite
    first.
    """
    rows = [line.split("|") for line in listing.splitlines()]
    lines = {
        f"deb {uri} {codename} {component}"
        for uri, codename, component in rows
        if codename.split("-")[0] == suite
    }
    return sorted(lines, key=lambda line: (f" {suite} " not in line, line))


def _debian_codename() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.partition("=")[2].strip('"')
    raise RuntimeFault(
        "this machine is no Debian or Ubuntu, so it cannot build a base: give --base-image a Debian image"
        " that can be pulled"
    )
