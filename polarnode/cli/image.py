"""`polarnode image`: builds the user's own images in the node's image store."""

from pathlib import Path
from typing import Any

import click

from polarnode.cli.options import config_of, existing_file_type
from polarnode.core.errors import ConfigError

FILES = ("Containerfile", "Dockerfile")


@click.group(short_help="Build images for tasks.")
def image() -> None:
    """Build images for tasks in the store that a node takes them from. Podman's own store is another one.

    \b
    polarnode image build agent/ --tag mine/agent
    """


@image.command(short_help="Build an image from a folder.")
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--tag", required=True, metavar="NAME", help="Name of the image, as runtime.image names it.")
@click.option(
    "--file",
    "containerfile",
    metavar="NAME",
    help="Name of the Containerfile in DIR. [default: Containerfile, else Dockerfile]",
)
@click.option(
    "--limit",
    "limit_s",
    type=click.FloatRange(min=1),
    default=3600.0,
    show_default=True,
    help="Most seconds that the build may take.",
)
@click.option(
    "--config", "config_file", type=existing_file_type(), help="Settings of the node that takes the image."
)
def build(folder: Path, tag: str, containerfile: str | None, limit_s: float, **params: Any) -> None:
    """Build the Containerfile in DIR in the node's own store. It may begin with any image, also with one of
    polarnode's own, `FROM localhost/polarnode/pi`, once that is built (its user is not root: write
    `USER root` before what needs it). Where it fails, it is tried once more with this machine's certificates.
    Unchanged steps are taken from the build before.

    \b
    polarnode image build agent/ --tag mine/agent
    polarnode run --cpu task.toml               # with runtime = { image = "mine/agent" }

    Exit codes: 0 when it was built; 1 otherwise, with the end of the build's log.
    """
    found = containerfile or next((name for name in FILES if (folder / name).is_file()), FILES[0])
    if not (folder / found).is_file():
        raise ConfigError(f"{folder / found} is not there: write it, or name the file with --file")
    config = config_of(params)
    from polarnode.cli.sources import build_folders
    from polarnode.sources.values import ImageBuild

    order = ImageBuild(folder=folder, containerfile=found, image=tag, limit_s=limit_s)
    build_folders([order], config, lambda text: click.echo(f"· {text}", err=True), again=True)
    click.echo(f'built: runtime = {{ image = "{tag}" }}')
