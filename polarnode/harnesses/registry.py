"""Which harness a task means: one of ours by name, or the user's own by import path."""

from polarnode.errors import Refused
from polarnode.harnesses import claude_code, mini_swe_agent, pi, shell
from polarnode.harnesses.harness import Harness
from polarnode.plugins import load_value
from polarnode.tasks import HarnessSpec

HARNESSES = {known.name: known for known in (pi.HARNESS, mini_swe_agent.HARNESS, claude_code.HARNESS, shell.HARNESS)}


def find(spec: HarnessSpec, *, allowed_imports: tuple[str, ...] = ()) -> Harness:
    """The harness of a task. An import path must lead to a `Harness` value, and below a prefix the node's config allows."""
    if spec.import_path is not None:
        return load_value(spec.import_path, Harness, allowed=allowed_imports, path="$.harness.import_path")
    harness = HARNESSES.get(spec.name)
    if harness is None:
        raise Refused(f"no harness is called {spec.name}; there are: {', '.join(sorted(HARNESSES))}", path="$.harness.name")
    if spec.version not in (None, harness.version):
        pinned = f"pins {harness.version}" if harness.version else "has no version"
        raise Refused(f"the image of {spec.name} {pinned}, not {spec.version}: leave version out", path="$.harness.version")
    return harness
