"""The node's settings: three sources in order of weight, and a sentence for each that can not work."""

import re
from typing import Any

import pytest
from attrs import fields

from polarnode.cli.main import main as command
from polarnode.core.errors import ConfigError
from polarnode.evaluators.judging import JudgeConfig
from polarnode.node.config import TINY_MODEL, NodeConfig
from polarnode.node.config_sources import (
    FLAG_BY_SETTING,
    as_written,
    names_as_written,
    parse_gpus,
    read_config,
    unknown_variables,
)


def test_setting_is_named_as_written() -> None:
    wrong = {"run_limit": 0}
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"flags": wrong}, "--run-limit"),
        ({"environment": {"POLARNODE_RUN_LIMIT": "0"}}, "POLARNODE_RUN_LIMIT"),
        ({"toml": "run_limit = 0"}, "run_limit"),
        ({"toml": "run_limit = 3", "flags": wrong}, "--run-limit"),
    )
    for given, name in cases:
        with pytest.raises(ConfigError, match=f"^{name} must be at least 1$"):
            read_config(**given)
    with pytest.raises(ConfigError, match=r"^POLARNODE_TP 3 must divide the 2 GPUs given"):
        read_config(environment={"POLARNODE_TP": "3", "POLARNODE_GPUS": "[0, 1]"})
    with pytest.raises(ConfigError, match=r"^tp 3 must divide the 2 GPUs given"):
        read_config(toml="tp = 3\ngpus = [0, 1]")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"flags": {"tls_cert": "a"}}, "--tls-cert and --tls-key belong together"),
        (
            {"environment": {"POLARNODE_TLS_CERT": "a"}},
            "POLARNODE_TLS_CERT and POLARNODE_TLS_KEY belong together",
        ),
        ({"toml": 'tls_cert = "a"'}, "tls_cert and tls_key belong together"),
        # one that was given in another way keeps its own name
        (
            {"toml": 'engine = "http://a:1"', "flags": {"cpu": True}},
            "engine URL takes no --cpu, gpus or tp: its servers have the model",
        ),
        ({"flags": {"adapters": {"a": "b"}}}, "--adapter: a cannot be served with --lora-rank 0: set it to"),
        ({"environment": {"POLARNODE_ADAPTERS": '{a = "b"}'}}, "such as POLARNODE_LORA_RANK=32"),
        ({"toml": '[adapters]\na = "b"'}, "such as lora_rank = 32"),
        ({"flags": {"labels": {"model": "x"}}}, "--label model cannot be set"),
        ({"toml": '[labels]\nmodel = "x"'}, "labels.model cannot be set"),
        ({"toml": "run_limt = 1"}, "run_limt is not a known field: did you mean run_limit?"),
        # what has no flag has the name of the file's key
        ({"flags": {"host": "0.0.0.0"}}, "--host 0.0.0.0 can be reached from outside"),
        ({"environment": {"POLARNODE_CAPTURE_LISTEN": "10.0.0.1"}}, "set POLARNODE_CAPTURE_TLS_CERT and"),
    ],
)
def test_settings_that_belong_together_are_named_alike(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read_config(**given)


def test_later_error_names_written_setting() -> None:
    names = names_as_written(toml="lora_rank = 8", flags={"tls_cert": "a.pem", "adapters": {"a": "b"}})
    cases = (
        ("control plane: tls_cert a.pem cannot be read", "control plane: --tls-cert a.pem cannot be read"),
        ("adapters.a: there is no b/x", "--adapter a: there is no b/x"),
        ("set lora_rank = 32, not tls_key", "set lora_rank = 32, not tls_key"),
        ("the file /x/tls_cert.pem and 'tls_cert' stay", "the file /x/tls_cert.pem and 'tls_cert' stay"),
    )
    for sentence, expected in cases:
        assert as_written(sentence, names) == expected


def test_flag_names_match_the_command() -> None:
    flags = {
        parameter.name: parameter.opts[0]
        for parameter in command.params
        if parameter.name in {each.name for each in fields(NodeConfig)}
    }
    assert flags == FLAG_BY_SETTING


def test_unknown_variable_is_named() -> None:
    judge = JudgeConfig(base_url="http://127.0.0.1:1/v1", model="m", key_env="POLARNODE_JUDGE_KEY")
    config = NodeConfig(judges={"j": judge})
    found = unknown_variables(
        {
            "POLARNODE_RUNLIMIT": "5",
            "POLARNODE_XYZ": "1",
            "POLARNODE_RUN_LIMIT": "5",
            "POLARNODE_URL": "http://127.0.0.1:8080",
            "POLARNODE_JUDGE_KEY": "k",
            "POLARNODE_SERVICE_HOST": "10.0.0.1",
            "POLARNODE_PORT_8080_TCP_ADDR": "10.0.0.1",
            "HOME": "/root",
        },
        config,
    )
    assert found == [
        "POLARNODE_RUNLIMIT is no setting and has no effect: did you mean POLARNODE_RUN_LIMIT?",
        "POLARNODE_XYZ is no setting and has no effect: docs/api.md lists the settings",
    ]


def test_defaults_are_loopback_and_embedded_model() -> None:
    config = read_config()
    assert (config.host, config.port, config.model) == ("127.0.0.1", 8080, str(TINY_MODEL))


def test_flags_beat_environment_beats_file() -> None:
    environment = {"POLARNODE_PORT": "9002", "POLARNODE_NODE_ID": "b", "UNRELATED": "x"}
    config = read_config(
        toml='port = 9001\nnode_id = "a"\nrun_limit = 3',
        environment=environment,
        flags={"port": 9003, "tp": None},
    )
    assert (config.port, config.node_id, config.run_limit, config.tp) == (9003, "b", 3, 1)


def test_environment_values_are_toml() -> None:
    config = read_config(environment={"POLARNODE_GPUS": "[0, 1]", "POLARNODE_TOKEN": "[not toml"})
    assert (config.gpus, config.token) == ((0, 1), "[not toml")


@pytest.mark.parametrize(("text", "gpus"), [("0", [0]), ("0-7", list(range(8))), ("0,2,4-5", [0, 2, 4, 5])])
def test_gpus_are_numbers_and_ranges(text: str, gpus: list[int]) -> None:
    assert parse_gpus(text) == gpus


@pytest.mark.parametrize("text", ["", "a", "3-1", "0,0", "1-", "-1", "0;1"])
def test_invalid_gpus_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpus"):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"cpu": True, "gpus": [0]}, "exclude each other"),
        ({"gpus": [0, 1, 2], "tp": 2}, "must divide"),
        ({"run_limit": 0}, "--run-limit must be at least 1"),
        ({"carried_mb": 0}, "carried_mb must be at least 1"),
        ({"log": ""}, "log is empty"),
        ({"snapshots": "/shared"}, "give log too, or leave it out"),
        ({"engine": "none"}, "--engine none runs no session: give --log"),
        ({"host": "0.0.0.0"}, "bearer token"),
        ({"host": "example.org"}, "bearer token"),
        ({"token": ""}, "token must be .* not empty"),
        ({"token": " "}, "token must be"),
        ({"token": "sécret"}, "printable ASCII"),
        (
            {"allowed_hosts": ["http://node.example"]},
            "--allowed-host: 'http://node.example' is no host's name",
        ),
        ({"allowed_hosts": ["node.example:8080"]}, "without scheme, port and path"),
        ({"allowed_hosts": ["*"]}, "--allowed-host"),
        ({"prot": 1}, "prot"),
        ({"port": "eighty"}, "port"),
    ],
)
def test_impossible_setting_is_named(said: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_config(flags=said)  # type: ignore[arg-type]


def test_public_address_with_token() -> None:
    assert read_config(flags={"host": "0.0.0.0", "token": "t"}).host == "0.0.0.0"


def test_config_hides_its_token() -> None:
    assert "hunter2" not in repr(read_config(flags={"token": "hunter2"}))


def test_broken_file_is_reported() -> None:
    with pytest.raises(ConfigError, match="not TOML"):
        read_config(toml="port = = 1")
    with pytest.raises(ConfigError, match="POLARNODE_PORT"):
        read_config(environment={"POLARNODE_PORT": "nine"})


def test_embedded_model_is_package_data() -> None:
    assert (TINY_MODEL / "config.json").is_file()
    assert isinstance(read_config(flags={"model": "/models/x"}), NodeConfig)


def test_labels_are_checked_and_names_reserved() -> None:
    """Labels are short texts, and the names of every node's own labels are reserved."""
    assert read_config(toml='labels = {gpu = "h100", "site/row" = "a 1"}').labels == {
        "gpu": "h100",
        "site/row": "a 1",
    }
    for labels, words in (
        ({"-gpu": "a"}, "'-gpu'] needs a name"),
        ({"gpu": ""}, r"--label gpu must be 1 to 256 printable characters"),
        ({"model": "m"}, r"--label model cannot be set"),
        ({f"l{each}": "1" for each in range(33)}, "--label must be at most 32 labels, not 33"),
        ({"gpu": 1}, "^--label gpu must be a string, not a number"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_config(flags={"labels": labels})
