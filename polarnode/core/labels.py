"""Labels: a node reports them, and a task requires some of the node that runs it."""

from collections.abc import Iterable, Mapping

from polarnode.core.errors import Refused


def all_labels(labels: Mapping[str, str], *, node: str, model: str) -> dict[str, str]:
    """The labels of a node, with the two that every node has and no setting can change."""
    return {**labels, "model": model, "node": node}


def first_unmet_label(requires: Mapping[str, str], labels: Mapping[str, str]) -> str | None:
    """The name of the first label that a task requires and a node lacks or has with another value."""
    return next((name for name, value in requires.items() if labels.get(name) != value), None)


def format_labels(labels: Mapping[str, str]) -> str:
    """Labels as people write them, in one order."""
    return ", ".join(f"{name}={value}" for name, value in sorted(labels.items()))


def choose_model(
    requires: Mapping[str, str], nodes: Iterable[Mapping[str, str]], *, path: str = "$.requires.model"
) -> str:
    """The model that a request asks for; "" if there is no node. Raises Refused if it names no model and
    nodes of several models could take it, because the first of them would sample it. `nodes`: the labels of
    the nodes that meet its requirements; `path`: where it names the model.
    """
    models = sorted({labels.get("model", "") for labels in nodes})
    if "model" not in requires and len(models) > 1:
        raise Refused(
            f"nodes of this log serve {', '.join(models)}: name the one that is meant, as"
            f" {path.removeprefix('$.')} = {models[0]}",
            path=path,
        )
    return requires.get("model") or next(iter(models), "")
