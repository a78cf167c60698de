"""The node's settings: three sources in order of weight, and a sentence for each that can not work."""

import pytest

from polarnode.core.errors import ConfigError
from polarnode.node.config import TINY_MODEL, NodeConfig, parse_gpus, read_config


def test_defaults_are_a_node_on_loopback_with_the_embedded_model() -> None:
    config = read_config()
    assert (config.host, config.port, config.model) == ("127.0.0.1", 8080, str(TINY_MODEL))


def test_flags_win_over_environment_over_file() -> None:
    environment = {"POLARNODE_PORT": "9002", "POLARNODE_NODE_ID": "b", "UNRELATED": "x"}
    config = read_config(
        toml='port = 9001\nnode_id = "a"\nrun_limit = 3',
        environment=environment,
        flags={"port": 9003, "tp": None},
    )
    assert (config.port, config.node_id, config.run_limit, config.tp) == (9003, "b", 3, 1)


def test_environment_values_are_read_as_toml() -> None:
    config = read_config(environment={"POLARNODE_GPUS": "[0, 1]", "POLARNODE_TOKEN": "[not toml"})
    assert (config.gpus, config.token) == ((0, 1), "[not toml")


@pytest.mark.parametrize(("text", "gpus"), [("0", [0]), ("0-7", list(range(8))), ("0,2,4-5", [0, 2, 4, 5])])
def test_gpus_are_numbers_and_ranges(text: str, gpus: list[int]) -> None:
    assert parse_gpus(text) == gpus


@pytest.mark.parametrize("text", ["", "a", "3-1", "0,0", "1-", "-1", "0;1"])
def test_gpus_that_can_not_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpus"):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"cpu": True, "gpus": [0]}, "not both"),
        ({"gpus": [0, 1, 2], "tp": 2}, "must divide"),
        ({"run_limit": 0}, "run_limit must be at least 1"),
        ({"carried_mb": 0}, "carried_mb must be at least 1"),
        ({"host": "0.0.0.0"}, "bearer token"),
        ({"host": "example.org"}, "bearer token"),
        ({"token": ""}, "token must be .* not empty"),
        ({"token": " "}, "token must be"),
        ({"token": "sécret"}, "printable ASCII"),
        (
            {"allowed_hosts": ["http://node.example"]},
            "allowed_hosts: 'http://node.example' is no host's name",
        ),
        ({"allowed_hosts": ["node.example:8080"]}, "without scheme, port and path"),
        ({"allowed_hosts": ["*"]}, "allowed_hosts"),
        ({"prot": 1}, "prot"),
        ({"port": "eighty"}, "port"),
    ],
)
def test_a_setting_that_can_not_work_is_named(said: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_config(flags=said)  # type: ignore[arg-type]


def test_a_public_address_is_served_with_a_token() -> None:
    assert read_config(flags={"host": "0.0.0.0", "token": "t"}).host == "0.0.0.0"


def test_a_config_does_not_show_its_token() -> None:
    assert "hunter2" not in repr(read_config(flags={"token": "hunter2"}))


def test_a_broken_file_says_so() -> None:
    with pytest.raises(ConfigError, match="not TOML"):
        read_config(toml="port = = 1")
    with pytest.raises(ConfigError, match="POLARNODE_PORT"):
        read_config(environment={"POLARNODE_PORT": "nine"})


def test_the_embedded_model_is_package_data() -> None:
    assert (TINY_MODEL / "config.json").is_file()
    assert isinstance(read_config(flags={"model": "/models/x"}), NodeConfig)


def test_labels_are_short_texts_and_the_names_of_every_node_stay_its_own() -> None:
    assert read_config(toml='labels = {gpu = "h100", "site/row" = "a 1"}').labels == {
        "gpu": "h100",
        "site/row": "a 1",
    }
    for labels, words in (
        ({"-gpu": "a"}, "'-gpu'] needs a name"),
        ({"gpu": ""}, r"labels\.gpu must be 1 to 256 printable characters"),
        ({"model": "m"}, r"labels\.model cannot be set"),
        ({f"l{each}": "1" for each in range(33)}, "labels must be at most 32 labels, not 33"),
        ({"gpu": 1}, "labels"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_config(flags={"labels": labels})
