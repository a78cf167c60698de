"""Labels: what a node says of itself, and what a task requires of the node that runs it."""

from collections.abc import Iterable, Mapping

from polarnode.core.errors import Refused


def every_label(labels: Mapping[str, str], *, node: str, model: str) -> dict[str, str]:
    """The labels of a node, with those that every node has: no setting can give these another value."""
    return {**labels, "model": model, "node": node}


def unmet(requires: Mapping[str, str], labels: Mapping[str, str]) -> str | None:
    """The name of the first label that a task requires and a node has not, or has with another value."""
    return next((name for name, value in requires.items() if labels.get(name) != value), None)


def label_texts(labels: Mapping[str, str]) -> str:
    """Labels as people write them, in one order."""
    return ", ".join(f"{name}={value}" for name, value in sorted(labels.items()))


def one_model(
    requires: Mapping[str, str], nodes: Iterable[Mapping[str, str]], *, path: str = "$.requires.model"
) -> str:
    """The model that is meant; "" where no node is there. Raises Refused for what names none, where nodes of
    several could take it: whichever is first would sample it. `nodes`: the labels of those that have what it
    requires; `path`: where the model is named.
    """
    models = sorted({labels.get("model", "") for labels in nodes})
    if "model" not in requires and len(models) > 1:
        raise Refused(
            f"nodes of this log serve {', '.join(models)}: name the one that is meant, as"
            f" {path.removeprefix('$.')} = {models[0]}",
            path=path,
        )
    return requires.get("model") or next(iter(models), "")
