"""Google: its tools, and which of them the model is to call.

The rule: what runs on Google's servers (googleSearch, codeExecution, urlContext …) is never shown to the model; `names` reports it as ignored.
"""

from polarnode.conversation import Json, Tool
from polarnode.errors import Refused
from polarnode.providers.google import shapes
from polarnode.providers.google.schemas import json_schema


def tools(said: tuple[shapes.Tool, ...]) -> tuple[Tool, ...]:
    """Every function, in order."""
    return tuple(
        _tool(declaration, f"$.tools[{index}].functionDeclarations[{place}]")
        for index, shape in enumerate(said)
        for place, declaration in enumerate(shape.functionDeclarations or ())
    )


def _tool(declaration: shapes.Declaration, path: str) -> Tool:
    return Tool(name=declaration.name, description=declaration.description or "", parameters=_parameters(declaration, path))


def _parameters(declaration: shapes.Declaration, path: str) -> dict[str, Json]:
    if declaration.parametersJsonSchema is not None:
        return json_schema(declaration.parametersJsonSchema, f"{path}.parametersJsonSchema")
    return json_schema(declaration.parameters or {}, f"{path}.parameters")


def tool_choice(config: shapes.ToolConfig | None, known: tuple[Tool, ...]) -> tuple[str, tuple[str, ...]]:
    """What the model must call, in the house's words, and sentences on what of it can not be said there."""
    calling = config.functionCallingConfig if config is not None else None
    if calling is None:
        return "auto", ()
    names = calling.allowedFunctionNames or ()
    _check(names, known)
    subset = (f"only {', '.join(names)} may be called, as the request says: the model is shown all tools and not held to these",)
    match (calling.mode or "AUTO").upper():
        case "AUTO" | "MODE_UNSPECIFIED":
            return "auto", ()
        case "VALIDATED":
            return "auto", subset if names else ()
        case "NONE":
            return "none", ()
        case "ANY":
            return (names[0], ()) if len(names) == 1 else ("required", subset if names else ())
        case other:
            path = "$.toolConfig.functionCallingConfig.mode"
            raise Refused(f"mode must be one of AUTO, ANY, NONE, VALIDATED, not {other!r}", path=path)


def _check(names: tuple[str, ...], known: tuple[Tool, ...]) -> None:
    for index, name in enumerate(names):
        if all(tool.name != name for tool in known):
            path = f"$.toolConfig.functionCallingConfig.allowedFunctionNames[{index}]"
            raise Refused(f"allowedFunctionNames has {name!r}, which is not among the functions: declare it", path=path)
