"""A node's teachers: what their settings may say, and that their vocabulary is the policy's."""

import json
import shutil
from pathlib import Path

import pytest
from attrs import evolve

from polarnode.cli.doctor import teachers
from polarnode.core.errors import ConfigError
from polarnode.node.config import TINY_MODEL
from polarnode.node.config_sources import read_config
from polarnode.node.opening import load_node_model
from polarnode.node.settings import teacher_settings
from polarnode.tokens.tokenizer import load_tokenizer, vocabulary_difference

FOLDER = 'model = "/models/a"\n'


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        ("cpu = true", "teachers.big.model is missing"),
        (FOLDER, "teachers.big needs cpu = true or gpus, one of them"),
        (FOLDER + "cpu = true\ngpus = [1]", "teachers.big needs cpu = true or gpus, one of them"),
        (FOLDER + "gpus = [1, 2, 3]\ntp = 2", "teachers.big.tp must divide the 3 GPUs given"),
        (FOLDER + "gpus = [0]", "teachers.big.gpus names a GPU that has another model"),
        (FOLDER + 'engine = "here"', "teachers.big.engine: 'here'"),
        ('engine = "http://a:1"\ncpu = true', "teachers.big takes no cpu and gpus"),
        ('engine = "http://a:1?key=x"', "must hold no key: set teachers.big.key_env"),
        ('engine = "http://a:1"\nkey_env = "sk-1"', "never a key itself"),
        ('engine = "http://a:1,http://a:1"', "names a server twice"),
    ],
)
def test_settings_that_cannot_work_are_refused(teacher: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(toml=f"gpus = [0]\n[teachers.big]\n{teacher}")
    assert words in str(caught.value)


def test_valid_teacher_settings_are_accepted() -> None:
    shared = "mem_fraction = 0.4\n"
    found = read_config(
        toml=f"gpus = [0]\n{shared}[teachers.big]\n{FOLDER}gpus = [0]\n{shared}"
        '[teachers.far]\nengine = "http://a:1/, http://b:1"\nkey_env = "BIG_KEY"'
    )
    assert found.teachers["big"].gpus == (0,)
    assert found.teachers["far"].engine_urls == ("http://a:1", "http://b:1")
    for name in ("policy", "no name"):
        with pytest.raises(ConfigError, match="teachers"):
            read_config(toml=f'gpus = [0]\n[teachers."{name}"]\n{FOLDER}gpus = [1]')


def test_teacher_with_other_vocabulary_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(TINY_MODEL, other)
    spelled = json.loads((other / "tokenizer.json").read_text())
    words = spelled["model"]["vocab"]
    one, two = next(iter(words)), [word for word in words if len(word) > 3][7]
    words[one], words[two] = words[two], words[one]
    (other / "tokenizer.json").write_text(json.dumps(spelled))
    config = read_config(toml=f'cpu = true\n[teachers.big]\nmodel = "{other}"\ncpu = true')
    model = load_node_model(config)
    with pytest.raises(
        ConfigError, match=r"teachers.big.model has another vocabulary than --model: token \d+ is"
    ):
        teacher_settings("big", config.teachers["big"], tmp_path, model, TINY_MODEL)
    (found,) = teachers(config)
    assert (found.ok, "another vocabulary" in found.what) == (False, True)
    (found,) = teachers(
        evolve(config, teachers={"big": evolve(config.teachers["big"], model=str(TINY_MODEL))})
    )
    assert found.ok
    assert vocabulary_difference(load_tokenizer(TINY_MODEL), model.tokenizer) is None


def test_each_server_gets_own_key(tmp_path: Path) -> None:
    from polarnode.engine.settings import host_environment

    config = read_config(
        toml='cpu = true\n[teachers.far]\nengine = "http://a:1"\nkey_env = "BIG_KEY"\n'
        '[teachers.near]\nengine = "http://b:1"'
    )
    model, keys = load_node_model(config), {"POLARNODE_ENGINE_KEY": "policy", "BIG_KEY": "big"}
    for name, key in (("far", "big"), ("near", "")):
        settings = teacher_settings(name, config.teachers[name], tmp_path, model, TINY_MODEL)
        found = host_environment(settings, gpus=(), scratch=tmp_path, base=keys)
        assert (found["POLARNODE_ENGINE_KEY"], settings.weight_version) == (key, name)
