"""The command line: `polarnode --gpus 0-7` serves; `run`, `submit`, `watch`, `export`, `inspect`, `doctor` are its verbs."""

from polarnode.cli.main import main

__all__ = ["main"]
