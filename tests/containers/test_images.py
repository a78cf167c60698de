"""Images: a recipe's digest changes with all it stands on, what is missing is built once, and what cannot be
built says why.
"""

import json
import os
import shutil
from pathlib import Path
from secrets import token_hex

import pytest
import trio
from podman_parts import LIFETIME_S, settings, tools

from polarnode.containers import recipes as recipes_module
from polarnode.containers.images import BELOW_LABEL, RECIPE_LABEL, Images, build_task_images, ensure_images
from polarnode.containers.probe import default_state_dir
from polarnode.containers.recipes import (
    BUILT_BASE,
    ImageRecipes,
    RuntimesSettings,
    archive_lines,
    default_runtimes_dir,
    on_top_image,
    read_recipes,
)
from polarnode.containers.runtimes import NodeRuntimes, open_runtimes
from polarnode.core.codec.tasks import IMAGE
from polarnode.core.errors import ConfigError, Refused, RuntimeFault
from polarnode.core.task import HarnessSpec, RuntimeSpec, TaskSpec
from polarnode.evaluators import command
from polarnode.harnesses import HARNESSES
from polarnode.merge.trajectory import Identity
from polarnode.rollouts.services import SessionOrder
from polarnode.sources.reading import make_build
from polarnode.sources.values import ImageBuild


def write_recipe(folder: Path, name: str, *, toml: str = "", containerfile: str = "FROM x\n") -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "runtime.toml").write_text(toml)
    (folder / name / "Containerfile").write_text(containerfile)


# ── recipes ───────────────────────────────────────────────────────────────────


def test_recipes_have_harness_versions() -> None:
    recipes = read_recipes(default_runtimes_dir())
    for harness in HARNESSES.values():
        if harness.version is None:
            continue
        assert recipes.by_name[harness.image].config.harnesses == (harness.name,)
        containerfile = (default_runtimes_dir() / harness.image / "Containerfile").read_text()
        assert f"_VERSION={harness.version}\n" in containerfile, (
            "the image pins what the harness module was measured with"
        )
        assert f"LABEL polarnode.harness.{harness.name}=" in containerfile
    assert recipes.image("agent") == recipes.image("base") == "localhost/polarnode/base:latest"
    assert recipes.image("quay.example/own:1") == "quay.example/own:1"


def test_recipes_contain_no_python_or_host() -> None:
    for path in default_runtimes_dir().rglob("*"):
        assert path.suffix != ".py"
        assert not path.is_file() or "http" not in path.read_text()


def test_digest_covers_all_image_inputs(tmp_path: Path) -> None:
    write_recipe(tmp_path, "below")
    write_recipe(tmp_path, "above", toml='base = "below"\n')
    first = read_recipes(tmp_path)
    assert read_recipes(tmp_path) == first
    write_recipe(tmp_path, "above", toml='# words\nbase = "below"\nharnesses = ["x"]\n')
    assert _digests(read_recipes(tmp_path)) == _digests(first), "words make no other image"
    assert _digests(read_recipes(tmp_path, base="ubuntu"))["below"] != _digests(first)["below"]
    (tmp_path / "below" / "extra.txt").write_text("x")
    second = _digests(read_recipes(tmp_path))
    assert second["below"] != _digests(first)["below"]
    assert second["above"] != _digests(first)["above"], "what stands on it is another too"


def test_digest_ignores_python_cache_files(tmp_path: Path) -> None:
    write_recipe(tmp_path, "own")
    (tmp_path / "own" / "tool.py").write_text("")
    first = _digests(read_recipes(tmp_path))
    (tmp_path / "own" / "__pycache__").mkdir()
    (tmp_path / "own" / "__pycache__" / "tool.cpython-311.pyc").write_bytes(b"x")
    assert _digests(read_recipes(tmp_path)) == first


def test_recipes_are_found_when_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our recipes are inside an installed package, or beside that of a checkout."""
    package = tmp_path / "polarnode"
    monkeypatch.setattr(recipes_module, "__file__", str(package / "containers" / "recipes.py"))
    with pytest.raises(
        ConfigError, match=r"no image recipes in .*/polarnode/runtimes or beside .* set runtimes_dir"
    ):
        default_runtimes_dir()
    (tmp_path / "runtimes").mkdir()
    assert default_runtimes_dir() == tmp_path / "runtimes"
    (package / "runtimes").mkdir(parents=True)
    assert default_runtimes_dir() == package / "runtimes"


def _digests(recipes: ImageRecipes) -> dict[str, str]:
    return {name: recipe.digest for name, recipe in recipes.by_name.items()}


def test_recipes_follow_their_bases_once(tmp_path: Path) -> None:
    write_recipe(tmp_path, "a", toml='base = "b"\n')
    write_recipe(tmp_path, "b", toml='base = "c"\n')
    write_recipe(tmp_path, "c", toml='aliases = ["see"]\n')
    recipes = read_recipes(tmp_path)
    assert [each.name for each in recipes.with_bases(["a", "b", "see", "foreign"])] == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("toml", "reported"),
    [
        ('base = "none"', "a/runtime.toml: base none is no recipe"),
        ('base = "a"', "a/runtime.toml: base a is its own base"),
        ("bse = 1", "a/runtime.toml: .*bse"),
        ("base = [", "a/runtime.toml: "),
        ("harnesses = 3", "a/runtime.toml: "),
    ],
)
def test_bad_recipe_is_named(tmp_path: Path, toml: str, reported: str) -> None:
    write_recipe(tmp_path, "a", toml=toml)
    with pytest.raises(ConfigError, match=reported):
        read_recipes(tmp_path)


def test_folder_without_recipes_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set runtimes_dir"):
        read_recipes(tmp_path)


def test_archive_is_from_this_machine() -> None:
    """The Debian archive is this machine's own, and no third party's."""
    reported = "http://a/debian/|bookworm|main\nhttp://b/x|nodistro|main\nhttp://a/debian/|bookworm-updates|main\nhttp://a/debian/|bookworm|main\n"
    assert archive_lines(reported, "bookworm") == [
        "deb http://a/debian/ bookworm main",
        "deb http://a/debian/ bookworm-updates main",
    ]


# ── a harness on top of a task's own image ────────────────────────────────────


def test_harness_recipes_extend_task_image() -> None:
    recipes = read_recipes(default_runtimes_dir())
    stages = recipes.stages(on_top_image("pi", "tasks/one:1"))
    assert [stage.recipe.name for stage in stages] == [
        "onto",
        "node",
        "pi",
    ], "what is installed for all tasks gives way to what is missing"
    assert [stage.below for stage in stages] == ["tasks/one:1", stages[0].image, stages[1].image]
    assert recipes.image(on_top_image("pi", "tasks/one:1")) == stages[-1].image
    assert stages[-1].image.startswith("localhost/polarnode/pi-on:")
    assert all(IMAGE.fullmatch(stage.image) for stage in stages)
    assert IMAGE.fullmatch(on_top_image("pi", "tasks/one:1")) is None, "no task can ask for it by name"


def test_session_image_has_harness_on_top() -> None:
    identity = Identity(
        session_id="s",
        task_id="t",
        group_id="t",
        sample_index=0,
        harness="pi",
        harness_version=None,
        model="m",
        node="n",
    )
    for runtime, image in (
        (RuntimeSpec(), "pi"),
        (RuntimeSpec(add_harness=True), "pi"),
        (RuntimeSpec(image="mine:1"), "mine:1"),
        (RuntimeSpec(image="mine:1", add_harness=True), on_top_image("pi", "mine:1")),
    ):
        spec = TaskSpec(instruction="x", harness=HarnessSpec(name="pi"), runtime=runtime)
        order = SessionOrder(
            identity=identity, spec=spec, harness=HARNESSES["pi"], evaluator=command.SESSION_COMPLETED
        )
        assert order.runtime.image == image


def test_harness_images_on_images_differ(tmp_path: Path) -> None:
    write_recipe(tmp_path, "below")
    write_recipe(tmp_path, "one", toml='base = "below"\n')
    write_recipe(tmp_path, "two", toml='base = "below"\n')
    recipes = read_recipes(tmp_path)
    names = {
        recipes.image(on_top_image(harness, image)) for harness in ("one", "two") for image in ("a:1", "a:2")
    }
    assert len(names) == 4
    assert recipes.stages(on_top_image("one", "a:1"))[0] == recipes.stages(on_top_image("two", "a:1"))[0], (
        "what they share is built once"
    )
    (tmp_path / "below" / "more").write_text("x")
    assert recipes.image(on_top_image("one", "a:1")) != read_recipes(tmp_path).image(
        on_top_image("one", "a:1")
    )
    assert recipes.stages(on_top_image("one", "below"))[0].below == "localhost/polarnode/below:latest", (
        "a task's image may be a recipe's"
    )


def test_only_recipe_can_be_on_top() -> None:
    with pytest.raises(Refused, match=r"quay\.example/x is no recipe") as refused:
        read_recipes(default_runtimes_dir()).stages(on_top_image("quay.example/x", "a:1"))
    assert refused.value.path == "$.runtime.add_harness"


# ── builds ────────────────────────────────────────────────────────────────────

# this run's own: a run that was killed leaves its image in the store, built already
TEST_IMAGE = f"polarnode-test-{token_hex(4)}"


@pytest.fixture
def recipes_dir(tmp_path: Path, podman: None) -> Path:
    """A copy of our base recipe, already built, and a small one upon it."""
    shutil.copytree(default_runtimes_dir() / "base", tmp_path / "runtimes" / "base")
    write_recipe(
        tmp_path / "runtimes",
        TEST_IMAGE,
        toml='base = "base"\n',
        containerfile="ARG BASE\nFROM ${BASE}\nRUN echo first > /tmp/made\n",
    )
    return tmp_path / "runtimes"


@pytest.fixture
def reported() -> list[str]:
    return []


def images_of(recipes_dir: Path, log: Path, reported: list[str]) -> Images:
    own = RuntimesSettings(state_dir=default_state_dir(), node_id="test", runtimes_dir=recipes_dir)
    return Images(settings=own, log=log, report=reported.append)


@pytest.mark.podman
async def test_image_is_built_once_until_changed(
    recipes_dir: Path, tmp_path: Path, reported: list[str]
) -> None:
    log = tmp_path / "log" / "images.log"
    images = images_of(recipes_dir, log, reported)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(images.ensure, TEST_IMAGE)
    built = [each for each in reported if each.startswith("built runtime")]
    assert len(built) == 1, reported
    assert "base" not in built[0], "its base was there"
    await images_of(recipes_dir, log, reported).ensure(TEST_IMAGE)
    assert len([each for each in reported if each.startswith("built")]) == 1
    await _assert_made(recipes_dir, b"first\n")
    write_recipe(
        recipes_dir,
        TEST_IMAGE,
        toml='base = "base"\n',
        containerfile="ARG BASE\nFROM ${BASE}\nRUN echo second > /tmp/made\n",
    )
    await images_of(recipes_dir, log, reported).ensure(TEST_IMAGE)
    await _assert_made(recipes_dir, b"second\n")
    shown = json.loads(
        await tools(log).output("image", "inspect", f"localhost/polarnode/{TEST_IMAGE}:latest")
    )
    assert shown[0]["Labels"][RECIPE_LABEL] == read_recipes(recipes_dir).by_name[TEST_IMAGE].digest
    assert b"STEP" in log.read_bytes()
    await tools(log).output("rmi", "--force", f"localhost/polarnode/{TEST_IMAGE}:latest")


async def _assert_made(recipes_dir: Path, content: bytes) -> None:
    own = RuntimesSettings(state_dir=default_state_dir(), node_id="test", runtimes_dir=recipes_dir)
    async with (
        open_runtimes(own) as runtimes,
        runtimes.open(RuntimeSpec(image=TEST_IMAGE), session_id="made", lifetime_s=LIFETIME_S) as runtime,
    ):
        assert await runtime.read("/tmp/made") == content
        assert await runtime.read("/etc/ssl/certs/ca-certificates.crt"), "the image has certificates"


@pytest.mark.podman
async def test_failed_build_shows_last_output(recipes_dir: Path, tmp_path: Path, reported: list[str]) -> None:
    write_recipe(
        recipes_dir,
        "broken",
        toml='base = "base"\n',
        containerfile="ARG BASE\nFROM ${BASE}\nRUN echo the reason; exit 7\n",
    )
    with pytest.raises(
        RuntimeFault, match=r"(?s)building runtime broken failed with exit code 7, see .*the reason"
    ):
        await images_of(recipes_dir, tmp_path / "log", reported).ensure("broken")


@pytest.mark.podman
async def test_cancelled_build_frees_the_lock(recipes_dir: Path, tmp_path: Path, reported: list[str]) -> None:
    write_recipe(
        recipes_dir,
        "slow",
        toml='base = "base"\n',
        containerfile="ARG BASE\nFROM ${BASE}\nRUN sleep 5151515\n",
    )
    images = images_of(recipes_dir, tmp_path / "log", reported)
    with trio.move_on_after(6) as scope:
        await images.ensure("slow")
    assert scope.cancelled_caught
    with trio.fail_after(120):
        await images.ensure("base")
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and "5151515" in _command(pid)]
    write_recipe(recipes_dir, "quick", toml='base = "base"\n', containerfile="ARG BASE\nFROM ${BASE}\n")
    await images_of(recipes_dir, tmp_path / "log", reported).ensure("quick")
    listed = json.loads(await tools(tmp_path / "log").output("ps", "--all", "--external", "--format", "json"))
    assert not [each for each in listed if each["State"] == "storage"], (
        "the next build removes what a killed one left"
    )
    await tools(tmp_path / "log").output("rmi", "--force", "localhost/polarnode/quick:latest")


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.podman
async def test_foreign_image_must_exist(podman: None, tmp_path: Path, reported: list[str]) -> None:
    images = Images(settings=settings(), log=tmp_path / "log", report=reported.append)
    with pytest.raises(
        Refused,
        match=r"no image is called localhost/none/such; there are recipes for .*image build DIR --tag localhost/none/such",
    ) as refused:
        await images.ensure("localhost/none/such")
    assert refused.value.path == "$.runtime.image"
    await images.ensure("localhost/polarnode/base:latest")


@pytest.mark.podman
async def test_bare_base_is_known_by_name(podman: None, tmp_path: Path) -> None:
    found = await tools(tmp_path / "log").output("images", "--format", "{{.Repository}}:{{.Tag}}")
    assert BUILT_BASE in found or "debian:" in found


@pytest.mark.podman
async def test_ensuring_existing_image_is_quiet(podman: None, tmp_path: Path, reported: list[str]) -> None:
    await ensure_images(settings(), ["base", "agent"], log=tmp_path / "log", report=reported.append)
    assert reported == []


# ── tasks' own images, and harnesses on them ──────────────────────────────────

OWNED = """\
FROM localhost/polarnode/base
USER root
RUN userdel --remove agent && useradd --uid 1000 --create-home owner && install --directory --owner owner /testbed
RUN echo {what} > /testbed/what
USER owner
WORKDIR /testbed
"""


def without_waits(reported: list[str]) -> list[str]:
    """What was said but of others on the same store: who holds its lock, and who removes images while old
    ones are looked for.
    """
    return [each for each in reported if not each.startswith(("waiting", "old layers stay"))]


def environment(folder: Path, what: str) -> ImageBuild:
    """A task's environment that nobody else has."""
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(OWNED.format(what=what))
    return make_build(folder, "Dockerfile", limit_s=600.0)


@pytest.fixture
def onto_dir(recipes_dir: Path) -> Path:
    """Recipes for a harness that is small, on a base that a task's image has already."""
    shutil.copytree(default_runtimes_dir() / "onto", recipes_dir / "onto")
    write_recipe(
        recipes_dir,
        "tool",
        toml='base = "base"\n',
        containerfile="ARG BASE\nFROM ${BASE}\nUSER root\nRUN echo 1 > /usr/local/tool\nUSER agent\n",
    )
    return recipes_dir


@pytest.mark.podman
async def test_task_folder_builds_once_by_content(podman: None, tmp_path: Path, reported: list[str]) -> None:
    """A task's folder is built once, and its content gives the image its name."""
    build = environment(tmp_path / "environment", token_hex(4))
    await build_task_images(settings(), [build, build], log=tmp_path / "log", report=reported.append)
    await build_task_images(settings(), [build], log=tmp_path / "log", report=reported.append)
    assert without_waits(reported) == [f"building {build.image} from {build.folder}"]
    assert environment(tmp_path / "environment", token_hex(4)).image != build.image
    await tools(tmp_path / "log").output("rmi", "--force", build.image)


@pytest.mark.podman
async def test_failed_task_folder_gives_reason(podman: None, tmp_path: Path, reported: list[str]) -> None:
    (tmp_path / "Dockerfile").write_text("FROM localhost/polarnode/base\nRUN echo the reason; exit 9\n")
    build = make_build(tmp_path, "Dockerfile", limit_s=600.0)
    with pytest.raises(RuntimeFault, match=r"(?s)failed with exit code 9, see .*the reason"):
        await build_task_images(settings(), [build], log=tmp_path / "log" / "log", report=reported.append)
    (tmp_path / "Dockerfile").write_text("FROM localhost/polarnode/base\nRUN sleep 600\n")
    slow = make_build(tmp_path, "Dockerfile", limit_s=5.0)
    with pytest.raises(RuntimeFault, match="did not end within its 5 s"):
        await build_task_images(settings(), [slow], log=tmp_path / "log" / "log", report=reported.append)


@pytest.mark.podman
async def test_harness_layer_rebuilds_with_task_image(
    onto_dir: Path, tmp_path: Path, reported: list[str]
) -> None:
    build, log = environment(tmp_path / "environment", "first"), tmp_path / "log"
    name = f"localhost/polarnode-test/{token_hex(4)}:latest"
    own = RuntimesSettings(state_dir=default_state_dir(), node_id="test", runtimes_dir=onto_dir)
    await build_task_images(own, [build], log=log, report=lambda text: None)
    await tools(log).output("tag", build.image, name)
    images = images_of(onto_dir, log, reported)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(images.ensure, on_top_image("tool", name))
    assert [each.split(" in ")[0] for each in reported if each.startswith("built")] == [
        f"built onto on {name}",
        f"built tool on {name}",
    ]
    await images_of(onto_dir, log, reported).ensure(on_top_image("tool", name))
    assert len(without_waits(reported)) == 4, "another node finds it there"
    await _assert_owned(own, on_top_image("tool", name), b"first\n")
    second = environment(tmp_path / "environment", "second")
    await build_task_images(own, [second], log=log, report=lambda text: None)
    await tools(log).output("tag", second.image, name)
    await images_of(onto_dir, log, reported).ensure(on_top_image("tool", name))
    await _assert_owned(own, on_top_image("tool", name), b"second\n")
    made = [stage.image for stage in read_recipes(onto_dir).stages(on_top_image("tool", name))]
    shown = json.loads(await tools(log).output("image", "inspect", made[0]))
    below = json.loads(await tools(log).output("image", "inspect", second.image))
    assert shown[0]["Labels"][BELOW_LABEL] == below[0]["Id"]
    await tools(log).output("rmi", "--force", *reversed(made), name, build.image, second.image)


async def _assert_owned(own: RuntimesSettings, image: str, what: bytes) -> None:
    """The task's own users, files and environment stay; the harness's user is another."""
    spec = RuntimeSpec(image=image, workdir="/testbed", user="owner")
    async with (
        open_runtimes(own) as runtimes,
        runtimes.open(spec, session_id="owned", lifetime_s=LIFETIME_S) as runtime,
    ):
        assert await runtime.read("/testbed/what") == what
        assert await runtime.read("/usr/local/tool") == b"1\n"
        ids = await runtime.run(
            ["sh", "-c", "id -u owner; id -un; id -u agent; touch /testbed/mine && echo wrote"]
        )
    lines = ids.stdout.decode().split()
    assert lines[:2] == ["1000", "owner"]
    assert lines[2] != "1000"
    assert lines[3] == "wrote"


@pytest.mark.podman
async def test_harness_on_missing_image_is_refused(
    onto_dir: Path, tmp_path: Path, reported: list[str]
) -> None:
    with pytest.raises(Refused, match="no image is called localhost/none/such"):
        await images_of(onto_dir, tmp_path / "log", reported).ensure(
            on_top_image("tool", "localhost/none/such")
        )


@pytest.mark.podman
async def test_only_root_writes_container_top(runtimes: NodeRuntimes) -> None:
    """As in any other runtime: tasks that are run as root make folders there."""
    script = ["sh", "-c", "stat -c %a /; mkdir /made && echo made"]
    for user, reported in (("root", "755\nmade\n"), ("agent", "755\n")):
        async with runtimes.open(
            RuntimeSpec(image="base", user=user, read_only=False), session_id="top", lifetime_s=LIFETIME_S
        ) as runtime:
            assert (await runtime.run(script)).stdout.decode() == reported
