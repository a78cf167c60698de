"""A hook of mkdocs (mkdocs.yml): pages of the repository's root on the site, and links as GitHub reads them.

Pages link to each other as files of the repository, so that they can be read there. On the site only `docs/` and
the pages of `ROOT_PAGES` exist: a link to any other file of the repository becomes its text.
"""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "README.md": "project/readme.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security-policy.md",
}
ON_SITE = {place: name for name, place in ROOT_PAGES.items()}
# A fenced block, or a link with its text.
PARTS = re.compile(
    r"^(?P<fence>```|~~~).*?^(?P=fence)$|\[(?P<text>[^\]\n]*)\]\((?P<target>[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's root."""
    for name, place in ROOT_PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with links that hold on the site. Diagrams stay text: their program would come from another host."""
    place = page.file.src_uri
    source = ON_SITE.get(place, f"docs/{place}")

    def written(found: re.Match[str]) -> str:
        if found["fence"]:
            return found[0].replace("```mermaid", "```text", 1)
        return link(found["text"], found["target"], source=source, place=place)

    return PARTS.sub(written, markdown)


def link(text: str, target: str, *, source: str, place: str) -> str:
    """One link of the file `source` of the repository, whose page is `place` on the site."""
    name, sharp, anchor = target.partition("#")
    if "://" in target or not name:
        return f"[{text}]({target})"
    path = normpath(join(dirname(source), name))
    if (ROOT / path).is_dir() and (ROOT / path / "README.md").exists():
        path = f"{path}/README.md"
    if path in ROOT_PAGES:
        there = ROOT_PAGES[path]
    elif path.startswith("docs/") or not (ROOT / path).exists():
        there = path.removeprefix("docs/")  # what does not exist stays a link, which mkdocs refuses
    else:
        return text
    return f"[{text}]({relpath(there, dirname(place) or '.')}{sharp}{anchor})"
