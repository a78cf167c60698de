"""The page's files: what is checked in is what was published, no module imports from elsewhere, the pure parts pass
their own tests, and a node serves them with headers that let nothing else run.
"""

import json
import re
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest
from control_plane_parts import Caller, open_plane

from polarnode.api.page import FILES, HEADERS, read_page_files

ROOT = Path(__file__).parents[2]
VENDOR = FILES / "vendor"
VENDORED = json.loads((VENDOR / "vendored.json").read_text())
OURS = sorted(FILES.glob("*.js"))
LONGEST = 300  # lines of a module of the page
SINKS = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|dangerouslySetInnerHTML|DOMParser"


def test_vendored_libraries_match_their_release() -> None:
    """Each library is as it was published, and has its licence."""
    listed = {each["file"] for each in VENDORED} | {
        name for each in VENDORED for name in each["licences"].values()
    }
    assert {path.name for path in VENDOR.iterdir()} == {*listed, "vendored.json"}
    for each in VENDORED:
        assert sha256((VENDOR / each["file"]).read_bytes()).hexdigest() == each["sha256"], each["file"]
        for licence, name in each["licences"].items():
            assert ("MIT" if licence == "MIT" else "Apache License") in (VENDOR / name).read_text()


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_module_is_short_and_local(path: Path) -> None:
    """A module says what it is, is short, and asks for nothing elsewhere."""
    source = path.read_text()
    assert source.startswith("/**"), "a module opens with what it is"
    assert len(source.splitlines()) <= LONGEST
    assert re.search(SINKS, source) is None, "text is written as text nodes"
    for target in re.findall(r'from "([^"]+)"', source):
        assert (path.parent / target).is_file(), target
    assert "http://" not in source
    assert "https://" not in source


def test_pure_parts_pass_own_tests() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip(
            "there is no node: apt-get install nodejs; tests/web/test_page_browser.py runs the same modules"
        )
    done = subprocess.run(
        [node, "--test", "tests/web/"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]


async def test_page_served_without_token(tmp_path: Path) -> None:
    """The page is served without the token and with its policy."""
    async with open_plane(tmp_path / "journal.sqlite", token="secret") as plane:
        caller = Caller(url=plane.url, token="wrong")
        for name in ("", "main.js", "page.css", "vendor/htm-preact.js", "icon.svg"):
            found = await caller.get(f"/ui/{name}")
            assert found.status == 200, name
            assert found.body == read_page_files()[name or "index.html"].body
            assert {name.lower(): value for name, value in HEADERS.items()}.items() <= found.headers.items()
        assert (await caller.get("/v1/status")).status == 401


async def test_only_page_files_are_served(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        caller = Caller(url=plane.url)
        for name in (
            "../page.py",
            "%2e%2e/page.py",
            "vendor/vendored.json",
            "package.json",
            "nothing.js",
            "vendor/",
            "/etc/passwd",
        ):
            found = await caller.get(f"/ui/{name}")
            assert found.status == 404, name
            assert found.json()["error"]["message"]
        assert (await caller.get("/ui/main.js", token="x")).status == 400, "no parameter is taken"


async def test_cross_site_guard_covers_page(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal.sqlite", token=None) as plane:
        for headers in (
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
            {"Origin": "http://evil.example"},
            {"Host": "evil.example"},
        ):
            found = await Caller(url=plane.url).call("GET", "/ui/", headers=headers)
            assert found.status == 403, headers


async def test_known_file_is_not_resent(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        caller = Caller(url=plane.url)
        first = await caller.get("/ui/main.js")
        again = await caller.call("GET", "/ui/main.js", headers={"If-None-Match": first.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
        other = await caller.call("GET", "/ui/main.js", headers={"If-None-Match": '"other"'})
        assert other.body == first.body
