"""The command line: `polarnode --gpus 0-7` serves a node; `polarnode --help` lists the commands."""

from polarnode.cli.main import main

__all__ = ["main"]
