"""A node's config from its three sources: a TOML file, the environment, and the flags of a command.

A later source overrides an earlier one. The message of a fault names a setting as the user wrote it.
"""

import re
import tomllib
from collections.abc import Mapping
from typing import Literal, get_origin

from attrs import fields

from polarnode.core import codec
from polarnode.core.conversation import Json
from polarnode.core.errors import ConfigError, Refused
from polarnode.core.spelling import nearest
from polarnode.node.config import NodeConfig, check_config

ENVIRONMENT_PREFIX = "POLARNODE_"
# variables of the client, of plug-ins in trainers, and for keys of external engines
OTHER_VARIABLES = frozenset(
    ENVIRONMENT_PREFIX + name
    for name in (
        "URL",
        "ENGINE_KEY",
        "TASK",
        "RUN",
        "PATIENCE_S",
        "WEIGHTS",
        "INSTRUCTION",
        "ARGS",
    )
)
OWN_FLAGS = (  # settings with a flag of the same name
    *("cpu", "gpus", "engine", "tp", "model", "context_length", "routed_experts", "lora_rank", "run_limit"),
    *(
        "record_requests",
        "base_image",
        "host",
        "port",
        "tls_cert",
        "tls_key",
        "state_dir",
        "log",
        "node_url",
        "limits",
    ),
)
FLAG_BY_SETTING = {
    **{name: f"--{name.replace('_', '-')}" for name in OWN_FLAGS},
    "import_paths": "--allow-import",
    "allowed_hosts": "--allowed-host",
    "adapters": "--adapter",
    "engine_args": "--engine-arg",
    "labels": "--label",
    "containers": "--no-containers",
}


def read_config(
    *,
    toml: str | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Json] | None = None,
) -> NodeConfig:
    """Read a config from its three sources. Flags that are None were not given. Raises ConfigError, which
    names settings as `written` does.
    """
    file, variables, given = _read_sources(toml, environment, flags)
    try:
        config = codec.structure({**file, **variables, **given}, NodeConfig, forbid_extra=True)
        check_config(config)
    except (Refused, ConfigError) as error:
        sentence = _with_path(error) if isinstance(error, Refused) else str(error)
        names = names_as_written(toml=toml, environment=environment, flags=flags)
        raise ConfigError(_beginning_as_written(sentence, names)) from error
    return config


def names_as_written(
    *,
    toml: str | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Json] | None = None,
) -> dict[str, str]:
    """Map each setting that was given to the name that the user wrote: a flag, a variable or a key of the
    file.
    """
    file, variables, given = _read_sources(toml, environment, flags)
    return {
        **{name: name for name in file},
        **{name: variable_of(name) for name in variables},
        **{name: FLAG_BY_SETTING.get(name, name) for name in given},
    }


def _read_sources(
    toml: str | None, environment: Mapping[str, str] | None, flags: Mapping[str, Json] | None
) -> tuple[dict[str, Json], dict[str, Json], dict[str, Json]]:
    given: dict[str, Json] = {name: value for name, value in (flags or {}).items() if value is not None}
    return _from_toml(toml), _from_environment(environment or {}), given


def _with_path(refused: Refused) -> str:
    """The sentence of a refusal, which is made to begin with the setting it is about."""
    path, sentence = (refused.path or "$").removeprefix("$."), str(refused)
    for named in (path, path.rpartition(".")[2]):
        if sentence.startswith(f"{named} "):
            return path + sentence.removeprefix(named)
    return f"{path}: {sentence}"


_SETTING_BY_FLAG = {flag: name for name, flag in FLAG_BY_SETTING.items()}
_FIRST_SETTING = re.compile(r"(?:--)?([a-z][a-z0-9_-]*)(?![\w-])")
# A setting within a sentence: a flag, or a name that is not an English word, perhaps with a value as in TOML.
_SETTING_WITHIN = re.compile(
    r"(?<![\w./'\"-])(--[a-z][a-z0-9-]*|[a-z0-9]+(?:_[a-z0-9]+)+)(?![\w./-])(?: = (?=\S))?"
)
_MAPPING_ENTRY = re.compile(r"(?<![\w./'\"-])(adapters|labels|engine_args)\.(?=[\w.-]*\w)")


def _beginning_as_written(sentence: str, names: Mapping[str, str]) -> str:
    """The sentence with the setting that it begins with, and the settings that belong to it, named as the
    user wrote them.
    """
    first = _FIRST_SETTING.match(sentence)
    name = first[1].replace("-", "_") if first else ""
    if first is None or name not in names:
        return as_written(sentence, names)
    rest = as_written(sentence[first.end() :], {**_names_like(names[name]), **names})
    if rest.startswith(".") and names[name].startswith("--"):
        return f"{names[name]} {rest[1:]}"
    return names[name] + rest


def _names_like(form: str) -> dict[str, str]:
    """Map every setting to a name of the same form as `form`: its flag, if it has one, its variable, or its
    key.
    """
    settings = [each.name for each in fields(NodeConfig)]
    if form.startswith("--"):
        return {each: FLAG_BY_SETTING.get(each, each) for each in settings}
    return {each: variable_of(each) if form.startswith(ENVIRONMENT_PREFIX) else each for each in settings}


def as_written(sentence: str, names: Mapping[str, str]) -> str:
    """The sentence with the settings in it named by `names`, which `written` gives. Where all of these have
    one form, other settings in the sentence get it too. Only flags, and names with a `_`, are recognised as
    settings.
    """
    given = [_SETTING_BY_FLAG.get(each[1], each[1]) for each in _SETTING_WITHIN.finditer(sentence)]
    alike = [_names_like(names[each]) for each in given if each in names]
    if alike and all(each == alike[0] for each in alike):
        names = {**alike[0], **names}

    def name_setting(found: re.Match[str]) -> str:
        name = _SETTING_BY_FLAG.get(found[1], found[1])
        new = names.get(name, found[1])
        if not found[0].endswith(" = "):
            return new
        return f"{new} " if new.startswith("--") else f"{new}=" if new != name else found[0]

    def name_entry(found: re.Match[str]) -> str:
        new = names.get(found[1], "")
        return f"{new} " if new.startswith("--") else found[0]

    return _SETTING_WITHIN.sub(name_setting, _MAPPING_ENTRY.sub(name_entry, sentence))


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return f"{ENVIRONMENT_PREFIX}{name.upper()}"


def unknown_variables(environment: Mapping[str, str], config: NodeConfig) -> list[str]:
    """A sentence for each POLARNODE_ variable that nobody reads. Most of them are misspelled."""
    settings = [each.name for each in fields(NodeConfig)]
    keys = [each.key_env for each in config.judges.values()]
    known = {
        *map(variable_of, settings),
        *OTHER_VARIABLES,
        *keys,
        *(each.key_env for each in config.teachers.values()),
    }
    found = []
    for name in sorted(environment):
        # Kubernetes adds the addresses of its services, such as POLARNODE_SERVICE_HOST for one called
        # polarnode.
        if not name.startswith(ENVIRONMENT_PREFIX) or name in known or re.search(r"_(SERVICE|PORT)_", name):
            continue
        near = nearest(name.removeprefix(ENVIRONMENT_PREFIX).lower(), settings)
        remedy = "docs/api.md lists the settings" if near is None else f"did you mean {variable_of(near)}?"
        found.append(f"{name} is no setting and has no effect: {remedy}")
    return found


def parse_gpus(text: str) -> list[Json]:
    """Parse `0-7`, `0` or `0,2,4-5` as a list of GPU numbers."""
    found: list[Json] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"--gpus {text}: give numbers and ranges, such as 0-7 or 0,2")
        if dash and int(last) < int(first):
            raise ConfigError(f"--gpus {text}: {part.strip()} counts down; write {last}-{first}")
        found.extend(range(int(first), int(last or first) + 1))
    if not found or len(set(map(str, found))) != len(found):
        raise ConfigError(f"--gpus {text}: name each GPU once")
    return found


def _from_toml(toml: str | None) -> dict[str, Json]:
    if toml is None:
        return {}
    try:
        return tomllib.loads(toml)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the config file is not TOML: {error}") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, Json]:
    """Read variables such as POLARNODE_PORT=9000. A value that is not text in the config is read as TOML."""
    by_variable = {variable_of(each.name): each for each in fields(NodeConfig)}
    settings: dict[str, Json] = {}
    for variable, text in environment.items():
        if variable in by_variable:
            each = by_variable[variable]
            settings[each.name] = (
                text
                if each.type in (str, str | None) or get_origin(each.type) is Literal
                else _toml_value(variable, text)
            )
    return settings


def _toml_value(variable: str, text: str) -> Json:
    try:
        value: Json = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{variable}={text}: write it as in TOML, such as 8, true or [0, 1]") from error
    return value
