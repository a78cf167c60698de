"""`make docs`: the pages are one site, every link on it leads somewhere, and nothing on it comes from another host."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD_S = 300.0  # 3 s on an idle core


def build(site: Path, *, source: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=source,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Loaded(HTMLParser):
    """What a browser fetches for a page by itself: scripts, styles, images, fonts; links are only followed."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.addresses.append(given.get("src") or "")
        if tag == "link":
            self.addresses.append(given.get("href") or "")
        assert tag != "pre" or "mermaid" not in (given.get("class") or ""), "its program is another host's"


def test_every_page_is_on_site(site: Path) -> None:
    """Every page of the repository is a page of the site."""
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    missing = [
        path
        for path in pages
        if not (
            site / path.with_name("index.html" if path.name == "README.md" else path.stem + ".html")
        ).exists()
    ]
    assert missing == []
    assert {"readme.html", "changelog.html", "contributing.html", "security-policy.html"} == {
        path.name for path in (site / "project").iterdir()
    }


def test_site_loads_nothing_foreign(site: Path) -> None:
    for page in site.rglob("*.html"):
        reader = Loaded()
        reader.feed(page.read_text())
        foreign = [address for address in reader.addresses if re.match(r"(https?:)?//", address)]
        assert foreign == [], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text()), style.name


def test_search_index_covers_the_pages(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    places = {each["location"].partition("#")[0] for each in found if "incarnation" in each["text"]}
    assert "glossary.html" in places
    assert len({each["location"].partition("#")[0] for each in found}) > 45


def test_dead_link_is_refused(tmp_path: Path) -> None:
    for name in (
        "mkdocs.yml",
        "tools",
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "examples",
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    for folder in (ROOT / "docs").rglob("*"):
        there = tmp_path / folder.relative_to(ROOT)
        if folder.is_dir():
            there.mkdir(parents=True)
            continue
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(folder.read_bytes())
    with (tmp_path / "docs" / "glossary.md").open("a") as page:
        page.write("\n[a](nosuch.md) [b](api.md#nosuch)\n")
    done = build(tmp_path / "site", source=tmp_path)
    assert done.returncode != 0
    assert "nosuch.md" in done.stderr
    assert "#nosuch" in done.stderr
