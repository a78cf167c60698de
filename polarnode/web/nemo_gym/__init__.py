"""An agent server of NeMo Gym whose agent is a polarnode: Gym's `/run` becomes a task, and its trajectory Gym's verify response.

The rule for whoever edits it: Gym's shapes are read and written here alone, after its documented models, and nothing of Gym is imported.
"""

from polarnode.web.nemo_gym.app import create_gym_app
from polarnode.web.nemo_gym.rollouts import NodeClient, Rollouts
from polarnode.web.nemo_gym.template import Template

__all__ = ["NodeClient", "Rollouts", "Template", "create_gym_app"]
