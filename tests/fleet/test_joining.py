"""Joining a fleet: the token, the certificates of its machines, the front's list, and what a node reports."""

import json
import os
import stat
from base64 import urlsafe_b64encode
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
import trio
from attrs import evolve
from fleet_kit import hollow_nodes
from hypothesis import given
from hypothesis import strategies as st

from polarnode.cli.options import config_of
from polarnode.client import AsyncPolarnodeClient
from polarnode.client.values import ClientError
from polarnode.core.errors import ConfigError, Refused
from polarnode.fleet import joining
from polarnode.fleet.config import FleetConfig
from polarnode.fleet.join_token import JoinToken, read_join_token
from polarnode.fleet.joining import JOINED, joinable, read_announced
from polarnode.fleet.serving import serve_front
from polarnode.http.self_signed import self_signed
from polarnode.http.server import Address, Certificate
from polarnode.node.config import NodeConfig
from polarnode.node.config_sources import read_config
from polarnode.node.joining import FleetEntry, joining_config

PIN = "0f" * 32
TOKEN = JoinToken(url="https://10.0.0.1:8080", certificate=PIN, token="s3cret")


def worded(**more: Any) -> str:
    body = {"url": TOKEN.url, "certificate": PIN, "token": "s3cret", **more}
    return "pnj1." + urlsafe_b64encode(json.dumps(body, separators=(",", ":")).encode()).decode().rstrip("=")


def test_a_join_token_is_one_word_and_keeps_its_secret() -> None:
    assert read_join_token(f" {TOKEN.text}\n") == TOKEN
    assert worded() == TOKEN.text
    assert "s3cret" not in repr(TOKEN)
    here = JoinToken(url="http://127.0.0.1:8080", certificate="", token="t")
    assert read_join_token(here.text) == here


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "begins with pnj1"),
        ("pnj2.abc", "begins with pnj1"),
        ("pnj1.", "other characters"),
        ("pnj1.a b", "other characters"),
        ("pnj1." + "a" * 9000, "other characters"),
        (TOKEN.text[:-7], "not whole"),
        ("pnj1.bm90IEpTT04", "not whole"),
        (worded(more=1), "no front that can be trusted"),
        (worded(url="http://10.0.0.1:8080"), "no front that can be trusted"),
        (worded(url="http://10.0.0.1:8080", certificate=""), "no front that can be trusted"),
        (worded(url="https://10.0.0.1:8080", certificate=""), "no front that can be trusted"),
        (worded(url="https://u:p@10.0.0.1"), "no front that can be trusted"),
        (worded(token=""), "no front that can be trusted"),
        (worded(token="a\nb"), "no front that can be trusted"),
    ],
)
def test_what_is_no_join_token_is_refused_without_repeating_it(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        read_join_token(text)
    assert text[5:] == "" or text not in str(refused.value)
    assert "s3cret" not in str(refused.value)


@given(st.text(max_size=40), st.integers(0, len(TOKEN.text) - 1))
def test_a_join_token_is_read_whole_or_refused(text: str, at: int) -> None:
    for each in (f"pnj1.{text}", TOKEN.text[:at] + text + TOKEN.text[at + 1 :]):
        with suppress(ConfigError):
            assert read_join_token(each).text == each.strip()


def test_a_node_takes_the_fleets_token_and_its_own_certificate(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("polarnode.node.joining.reached_from", lambda url: "10.0.0.2")
    config = read_config(environment={"POLARNODE_JOIN": TOKEN.text}, flags={"state_dir": str(tmp_path)})
    assert (config.token, "s3cret" in repr(config), TOKEN.text in repr(config)) == ("s3cret", False, False)
    ready = joining_config(config)
    assert (ready.host, ready.tls_cert) == ("10.0.0.2", str(tmp_path / "tls.crt"))
    assert ready.node_id == gethostname()
    named = evolve(config, host="0.0.0.0", tls_cert="a", tls_key="b", node_id="gpu-1")
    assert joining_config(named) == named
    plain = NodeConfig()
    assert joining_config(plain) is plain
    with pytest.raises(ConfigError, match="unset POLARNODE_TOKEN"):
        read_config(environment={"POLARNODE_JOIN": TOKEN.text, "POLARNODE_TOKEN": "other"})
    file = tmp_path / "join.token"
    file.write_text(TOKEN.text + "\n")
    assert config_of({"join": f"@{file}"}).token == "s3cret"
    with pytest.raises(ConfigError, match="command lines are visible"):
        config_of({"join": TOKEN.text})
    with pytest.raises(ConfigError, match="cannot be read"):
        config_of({"join": f"@{tmp_path}/none"})


def test_a_certificate_is_made_once_and_its_key_is_private(tmp_path: Path) -> None:
    chain, key = self_signed(tmp_path, "10.0.0.2")
    assert stat.S_IMODE(os.stat(key).st_mode) == 0o600
    digest = Certificate(chain, key).digest
    assert self_signed(tmp_path, "node.example") == (chain, key)
    assert Certificate(chain, key).digest == digest
    assert sorted(each.name for each in tmp_path.iterdir()) == ["tls.crt", "tls.key"]
    with pytest.raises(ConfigError, match="cannot be kept in"):
        self_signed(tmp_path / "none", "x")


def test_a_front_makes_what_it_was_not_given(tmp_path: Path) -> None:
    config = joinable(FleetConfig(host="10.0.0.1", join=True, state_dir=str(tmp_path))).check()
    assert config.token == (tmp_path / "token").read_text().strip()
    assert len(config.token) >= 32
    assert config.nodes == (f"@{tmp_path / JOINED}",)
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir() if each.suffix != ".crt"} == {
        0o600
    }
    assert joinable(FleetConfig(host="10.0.0.1", join=True, state_dir=str(tmp_path))) == config
    for settings, words in (
        ({"host": "0.0.0.0"}, "no address that nodes can call"),
        ({"node_token": "other"}, "unset POLARNODE_NODE_TOKEN"),
        ({"public_url": "http://a:1"}, "must be https://"),
        ({"public_url": "a:1"}, "must be an http or https address"),
    ):
        given_config = FleetConfig(
            **{"host": "10.0.0.1", "join": True, "state_dir": str(tmp_path), **settings}
        )
        with pytest.raises(ConfigError, match=words):
            joinable(given_config).check()


def test_an_announcement_names_where_a_token_may_be_sent() -> None:
    assert read_announced(f"https://10.0.0.2:8080/#{PIN}") == ("https://10.0.0.2:8080", PIN)
    assert read_announced("http://127.0.0.1:8080") == ("http://127.0.0.1:8080", "")
    for text, words in (
        ("http://10.0.0.2:8080", "the fleet's token is sent there"),
        ("https://10.0.0.2:8080", "names? the certificate|name the certificate"),
        (f"https://10.0.0.2:8080/path#{PIN}", "without a path"),
        ("https://10.0.0.2:8080#12", "64 hexadecimal digits"),
        ("ftp://127.0.0.1", "must be an http or https address"),
    ):
        with pytest.raises(Refused, match=words):
            read_announced(text)


async def test_nodes_announce_themselves_and_are_known_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On loopback, without TLS; tests/recovery has three machines."""
    monkeypatch.setattr(joining, "GATHER_S", 0.0)
    monkeypatch.setattr("polarnode.fleet.serving.ASKED_S", 0.1)
    settings = FleetConfig(join=True, port=0, state_dir=str(tmp_path / "front"))
    (tmp_path / "front").mkdir()
    config = joinable(settings)
    assert config.token is not None
    async with hollow_nodes(tmp_path, 2, token=config.token) as nodes:
        async with serve_front(config) as (front, address), trio.open_nursery() as nursery:
            url = f"http://127.0.0.1:{address.port}"
            token = JoinToken(url=url, certificate="", token=config.token)
            entries = [FleetEntry(config=NodeConfig(), token=token) for _ in nodes]
            for entry, node in zip(entries, nodes, strict=True):
                nursery.start_soon(entry.announce, Address(host="127.0.0.1", port=node.port))
            with trio.fail_after(60):
                while len(front.roster.in_state("up")) < 2:  # noqa: ASYNC110
                    await trio.sleep(0.05)
            assert [each.status()["problem"] for each in entries] == [None, None]
            async with AsyncPolarnodeClient(url, token="wrong", patience_s=0) as client:
                with pytest.raises(ClientError, match="token"):
                    await client.status()
            wrong = FleetEntry(config=NodeConfig(), token=evolve(token, token="wrong"))
            nursery.start_soon(wrong.announce, Address(host="127.0.0.1", port=1))
            with trio.fail_after(30):
                while wrong.problem is None:  # noqa: ASYNC110
                    await trio.sleep(0.05)
            assert "does not know this node's token" in wrong.problem
            assert "wrong" not in wrong.problem
            assert len(front.roster.members) == 2
            nursery.cancel_scope.cancel()
        async with serve_front(config) as (front, _):  # nobody announces himself to it
            with trio.fail_after(60):
                while len(front.roster.in_state("up")) < 2:  # noqa: ASYNC110
                    await trio.sleep(0.05)


async def test_a_silent_node_is_forgotten_once_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "FORGOTTEN_S", 0.5)
    monkeypatch.setattr(joining, "ANNOUNCED_S", 0.1)
    monkeypatch.setattr("polarnode.fleet.serving.ASKED_S", 0.1)
    config = joinable(FleetConfig(join=True, port=0, state_dir=str(tmp_path)))
    (tmp_path / JOINED).write_text("http://127.0.0.1:9\n")
    async with serve_front(config) as (front, _):
        with trio.fail_after(60):
            while not front.roster.members:  # noqa: ASYNC110
                await trio.sleep(0.05)
            while front.roster.members:  # noqa: ASYNC110
                await trio.sleep(0.05)
    assert (tmp_path / JOINED).read_text() == ""
