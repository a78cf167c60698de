"""The recipes of `runtimes/`: what each folder says, and the digest by which a built image is known to be of this very recipe.

A harness can be put on top of a task's own image: then its recipes are built one upon the other from there, and the images are called by the
task's image and all these recipes. Pure but for reading those folders. A recipe's digest covers its files, its base's digest and the base image asked for, so that a change
below rebuilds what stands above.
"""

import hashlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from attrs import field, frozen

from polarnode import wire
from polarnode.errors import ConfigError, HarnessError, Refused

PREFIX = "localhost/polarnode"  # Podman's own word for images no registry gave
CONTAINERFILE = "Containerfile"
ON = "+"  # between a harness's image and the task's it stands on; no task can write it, because no image's name has it


@frozen(kw_only=True)
class Told:
    """A runtime.toml as it stands. `base` is another recipe's name, None for one that stands on Debian itself. User and workdir are the task's.

    `instead_of` is the recipe in whose place this one stands on a task's own image.
    """

    base: str | None = None
    instead_of: str | None = None
    harnesses: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


@frozen(kw_only=True)
class Recipe:
    """One folder of `runtimes/`: what its runtime.toml says, and the digest of all that makes its image what it is."""

    name: str
    folder: Path
    digest: str
    told: Told

    @property
    def image(self) -> str:
        return f"{PREFIX}/{self.name}:latest"


@frozen(kw_only=True)
class Stage:
    """One recipe on the way up from a task's own image: what is built, from what, and what it is called."""

    recipe: Recipe
    below: str
    image: str


def on_top(harness_image: str, image: str) -> str:
    """How the image is asked for that has a harness's recipe on top of a task's own image."""
    return f"{harness_image}{ON}{image}"


@frozen(kw_only=True)
class Recipes:
    """All recipes, by name."""

    by_name: Mapping[str, Recipe] = field(factory=dict)

    def find(self, name: str) -> Recipe | None:
        """The recipe of that name or alias."""
        found = self.by_name.get(name)
        return found or next((recipe for recipe in self.by_name.values() if name in recipe.told.aliases), None)

    def image(self, name: str) -> str:
        """What Podman calls it: a recipe's own image, that of a harness `on_top` of another, or the name as it stands."""
        if ON in name:
            return self.stages(name)[-1].image
        recipe = self.find(name)
        return recipe.image if recipe else name

    def image_for(self, harness: str) -> str:
        """The recipe that carries a harness, by name."""
        for recipe in self.by_name.values():
            if harness in recipe.told.harnesses:
                return recipe.name
        raise HarnessError(f"no runtime carries the harness {harness}: name it under harnesses in one of the runtime.toml files")

    def with_bases(self, names: Sequence[str]) -> tuple[Recipe, ...]:
        """The recipes of these names and all they stand on, each after its base, each once. Names of no recipe are left out."""
        ordered: dict[str, Recipe] = {}
        for name in names:
            for recipe in reversed(tuple(self._down(name))):
                ordered.setdefault(recipe.name, recipe)
        return tuple(ordered.values())

    def stages(self, name: str) -> tuple[Stage, ...]:
        """What is built for a name that `on_top` gave, each after what it stands on; refused where the harness's image is no recipe."""
        harness, _, below = name.partition(ON)
        made: list[Stage] = []
        running = hashlib.sha256(self.image(below).encode())
        for recipe in map(self._onto, self.with_bases([harness])):
            running.update(recipe.digest.encode())
            stands_on = made[-1].image if made else self.image(below)
            made.append(Stage(recipe=recipe, below=stands_on, image=f"{PREFIX}/{recipe.name}-on:{running.hexdigest()[:24]}"))
        if not made:
            raise Refused(f"{harness} is no recipe: a harness is put on a task's image by its folder of runtimes/", path="$.runtime.add_harness")
        return tuple(made)

    def _onto(self, recipe: Recipe) -> Recipe:
        return next((other for other in self.by_name.values() if other.told.instead_of == recipe.name), recipe)

    def _down(self, name: str) -> Iterator[Recipe]:
        recipe = self.find(name)
        while recipe is not None:
            yield recipe
            recipe = self.by_name[recipe.told.base] if recipe.told.base else None


def default_runtimes_dir() -> Path:
    """The checkout's own recipes: `runtimes/` beside the package."""
    folder = Path(__file__).parents[3] / "runtimes"
    if not folder.is_dir():
        raise ConfigError("polarnode is installed without its checkout: set runtimes_dir to a folder of image recipes")
    return folder


def read_recipes(runtimes_dir: Path, *, base: str | None = None) -> Recipes:
    """Read every folder with a runtime.toml. `base` is the public image asked for, part of each digest."""
    told = {path.parent.name: _told(path) for path in sorted(runtimes_dir.glob("*/runtime.toml"))}
    if not told:
        raise ConfigError(f"no runtime.toml in the folders of {runtimes_dir}: set runtimes_dir to a folder of image recipes")
    made: dict[str, Recipe] = {}
    for name in told:
        _make(name, told, made, runtimes_dir, base, ())
    return Recipes(by_name=made)


def _make(name: str, told: Mapping[str, Told], made: dict[str, Recipe], folder: Path, base: str | None, above: tuple[str, ...]) -> Recipe:
    if name in made:
        return made[name]
    if name in above or name not in told:
        raise ConfigError(f"{above[-1]}/runtime.toml: base {name} is {'its own base' if name in above else 'no recipe'}")
    said = told[name]
    below = _make(said.base, told, made, folder, base, (*above, name)).digest if said.base else f"on {base or 'debian'}"
    made[name] = Recipe(name=name, folder=folder / name, digest=_digest(folder / name, below), told=said)
    return made[name]


def _told(path: Path) -> Told:
    try:
        return wire.structure(tomllib.loads(path.read_text()), Told, forbid_extra=True)
    except (Refused, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path.parent.name}/runtime.toml: {error}") from error


def _digest(folder: Path, below: str) -> str:
    running = hashlib.sha256(below.encode())
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "runtime.toml":
            running.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return running.hexdigest()[:24]
