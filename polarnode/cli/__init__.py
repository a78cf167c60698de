"""The command line: `polarnode --gpus 0-7` serves a node; `polarnode --help` lists the commands.

In a trainer's environment without `polarnode[node]`, the commands that only ask a node work if click and rich
are installed, as they are in most environments. Otherwise a command ends with one sentence.
"""

from typing import NoReturn

NODE = "this needs a node's packages ({missing} is not installed): pip install 'polarnode[node]'"


def _without_click(*arguments: object, **options: object) -> NoReturn:
    raise SystemExit(NODE.format(missing="click"))


try:
    from polarnode.cli.main import main
except ModuleNotFoundError as missing:
    if missing.name != "click":
        raise
    main = _without_click  # type: ignore[assignment]

__all__ = ["main"]
