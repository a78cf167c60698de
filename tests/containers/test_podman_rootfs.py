"""Which Debian images stand on: the one asked for, one at hand, one a registry gives, one built here; and
that it is said which.

Podman, apt and mmdebstrap are small programs here that note what they are told; the real ones are used
whenever a store is new.
"""

import importlib
from pathlib import Path

import pytest

from polarnode.containers.probe import Store, make_folders, store_at
from polarnode.containers.recipes import BUILT_BASE, PUBLIC, PodmanTools, base_image
from polarnode.core.errors import RuntimeFault

STORE = importlib.import_module("polarnode.containers.probe")

PODMAN = """#!/bin/sh
echo "podman $*" >> {log}
case "$1 $2" in
  "image exists") exec /bin/grep -qx "$3" {known} ;;
  "pull --quiet") exec /bin/grep -qx "$3" {registry} ;;
esac
"""
APT = "#!/bin/sh\necho 'http://archive/debian|SUITE|main'\necho 'http://third/party|other|main'\n"
MMDEBSTRAP = '#!/bin/sh\necho "mmdebstrap $*" >> {log}\necho said by mmdebstrap\nexit {code}\n'


class Machine:
    """A store on a machine whose programs are ours."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        known: str = "",
        registry: str = "",
        debootstrap: int = 0,
    ) -> None:
        self.folder, self.said = folder, list[str]()
        self.told = folder / "told"
        suite = next(
            line
            for line in Path("/etc/os-release").read_text().splitlines()
            if line.startswith("VERSION_CODENAME")
        ).partition("=")[2]
        self.suite = suite.strip('"')
        monkeypatch.setattr(STORE, "SERVICE_PATH", str(folder))
        monkeypatch.setattr(STORE, "MEMORY_FOLDERS", ())  # so that all of it is in the test's own folder
        for name, content in (("known", known), ("registry", registry), ("told", "")):
            (folder / name).write_text(content + "\n")
        self.program(
            "podman", PODMAN.format(log=self.told, known=folder / "known", registry=folder / "registry")
        )
        self.program("apt-get", APT.replace("SUITE", self.suite))
        self.program("mmdebstrap", MMDEBSTRAP.format(log=self.told, code=debootstrap))
        self.store: Store = store_at(folder / "state")
        make_folders(self.store)

    def program(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    async def base(self, asked: str | None = None) -> str:
        tools = PodmanTools(podman=self.folder / "podman", store=self.store, log=self.folder / "log")
        return await base_image(tools, self.store, asked, self.said.append)

    def notes(self, program: str) -> list[str]:
        return [line for line in self.told.read_text().splitlines() if line.startswith(program)]


async def test_requested_base_is_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, registry="own/debian:1")
    assert await machine.base("own/debian:1") == "own/debian:1"
    assert machine.said == ["pulling own/debian:1"]


async def test_local_base_is_not_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, known="own/debian:1")
    assert await machine.base("own/debian:1") == "own/debian:1"
    assert machine.said == []
    assert not machine.notes("podman pull")


async def test_missing_base_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeFault, match="pulling own/debian:1 failed"):
        await Machine(tmp_path, monkeypatch).base("own/debian:1")


@pytest.mark.parametrize("known", [BUILT_BASE, PUBLIC])
async def test_earlier_base_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str) -> None:
    machine = Machine(tmp_path, monkeypatch, known=known, registry=PUBLIC)
    assert await machine.base() == known
    assert machine.said == []


async def test_registry_comes_before_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, registry=PUBLIC)
    assert await machine.base() == PUBLIC
    assert machine.said == [f"pulled {PUBLIC}"]
    assert not machine.notes("mmdebstrap")


async def test_without_registry_archive_builds_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch)
    assert await machine.base() == BUILT_BASE
    assert machine.said[0] == f"no registry gives {PUBLIC}"
    assert "building" in machine.said[1]
    assert machine.said[2] == f"built {BUILT_BASE}"
    (note,) = machine.notes("mmdebstrap")
    assert f" {machine.suite} " in note
    assert note.endswith(f" deb http://archive/debian {machine.suite} main"), "and of no third party"
    assert machine.notes("podman import")[0].endswith(BUILT_BASE)


async def test_failing_build_gives_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, debootstrap=25)
    with pytest.raises(
        RuntimeFault, match=r"(?s)building a Debian base failed with exit code 25, see .*said by mmdebstrap"
    ):
        await machine.base()
    assert not machine.notes("podman import")


async def test_hanging_registry_is_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, known="")
    monkeypatch.setattr("polarnode.containers.recipes.PULL_S", 0.5)
    machine.program(
        "podman",
        (tmp_path / "podman")
        .read_text()
        .replace('exec /bin/grep -qx "$3" ' + str(tmp_path / "registry"), "exec /bin/sleep 1000"),
    )
    assert await machine.base() == BUILT_BASE
    assert machine.said[0].startswith(f"no registry gave {PUBLIC} within")


async def test_missing_mmdebstrap_has_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch)
    (tmp_path / "mmdebstrap").unlink()
    with pytest.raises(RuntimeFault, match="apt-get install mmdebstrap, or give --base-image"):
        await machine.base()


async def test_machine_without_apt_is_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch)
    machine.program("apt-get", "#!/bin/sh\nexit 100\n")
    with pytest.raises(RuntimeFault, match="apt does not report"):
        await machine.base()
