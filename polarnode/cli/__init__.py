"""The command line: `polarnode --gpus 0-7` serves; `run`, `submit`, `watch`, `export`, `inspect`, `doctor`,
`gym-agent` are among its verbs.
"""

from polarnode.cli.main import gym_agent, main

main.add_command(gym_agent)

__all__ = ["main"]
