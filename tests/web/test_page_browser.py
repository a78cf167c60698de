"""The page in a real browser, against a node with the real control plane, journal, scheduler and tokenizer: every
view, hostile text, tokens against the JSON, the keyboard alone, and what other sites' pages may do.

Screenshots for a person are left in `out/ui/`.
"""

import http.server
import json
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field
from client_kit import here
from fleet_kit import open_fleet_in_thread
from page_samples import HOSTILE
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "polarnode" / "models" / "tiny"
SHOTS = ROOT / "out" / "ui"
CHROMIUM = shutil.which("chromium")
STARTED_S = 60  # for a node: 8 s, most of it the import of transformers
TOKEN = "a secret of this test"
expect.set_options(timeout=20_000)  # two busy cores
VIOLATIONS = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
]


# ── nodes and pages ───────────────────────────────────────────────────────────


@contextmanager
def open_node(folder: Path, *options: str) -> Iterator[str]:
    """A node of `page_node`, as a program; gives its address."""
    command = [sys.executable, ROOT / "tests" / "kits" / "page_node.py", "--folder", folder, *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        stop = threading.Timer(STARTED_S, process.kill)
        stop.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            stop.cancel()
            assert line, "the node did not start"
            yield json.loads(line)["url"]
        finally:
            stop.cancel()
            process.kill()


class Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Not into the test's output."""


@contextmanager
def open_files(folder: Path) -> Iterator[int]:
    """A web server of a folder; gives its port."""
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=folder))
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield served.server_port
    served.shutdown()
    thread.join()
    served.server_close()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder of `node`."""
    return tmp_path_factory.mktemp("page") / "node" / "state"


@pytest.fixture(scope="module")
def node(state: Path) -> Iterator[str]:
    with open_node(state.parent, "--long", "100000") as url:
        yield url


@pytest.fixture(scope="module")
def locked_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with open_node(tmp_path_factory.mktemp("page") / "locked", "--token", TOKEN, "--actions") as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    arguments = ["--no-sandbox", "--host-resolver-rules=MAP evil.example 127.0.0.1"]
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield opened
        opened.close()


@define(eq=False)
class Watched:
    """A page, and all that went wrong in it."""

    page: Page
    problems: list[str] = field(factory=list)
    asked: list[str] = field(factory=list)

    def watch(self) -> None:
        self.page.on(
            "console",
            lambda each: self.problems.append(each.text) if each.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def is_clean(self, url: str) -> None:
        """No error, no violation of the policy, and no request to anybody else."""
        assert self.problems == []
        assert self.page.evaluate("window.violations") == []
        assert [each for each in self.asked if not each.startswith(f"{url}/")] == []


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(viewport={"width": 1360, "height": 860}, color_scheme="light")
    made.add_init_script(VIOLATIONS)
    made.set_default_timeout(20_000)
    yield made
    made.close()


@pytest.fixture
def watched(context: BrowserContext) -> Watched:
    made = Watched(context.new_page())
    made.watch()
    return made


def answer(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}{path}", timeout=20) as found:
        return json.load(found)


def submit(url: str, task_id: str, *, seconds: int) -> None:
    """A task whose only session runs for so long."""
    harness = {"command": ["hollow", str(seconds), "1"]}
    task = json.dumps({"task_id": task_id, "instruction": "x", "harness": harness})
    order = urllib.request.Request(f"{url}/v1/tasks", task.encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(order, timeout=20).close()


# ── every view ────────────────────────────────────────────────────────────────

VIEWS: dict[str, tuple[str, str]] = {
    "now": ("#/now", "Engine hosts"),
    "sessions": ("#/sessions", "last turn ago"),
    "groups": ("#/groups", "with equal rewards"),
    "session": ("#/s/parser-1", "Timeline"),
    "failed": ("#/s/parser-3", "KeyError: 'x'"),
    "fork": ("#/s/tree-2", "in another state from turn 0"),
    "conversation": ("#/s/parser-1/conversation", "I look at the code first."),
    "lineage": ("#/s/parser-1/lineage", "the history was edited"),
    "compare": ("#/s/parser-1/compare", "tokens are the same"),
    "log": ("#/s/parser-3/log", "KeyError: 'x'"),
    "logs": ("#/logs", "line 899 of the node"),
    "tokens": ("#/s/parser-1/tokens", "tokens, 1"),
    "sliced": ("#/s/sliced-0/tokens?row=1", "part 2 of"),
    "long": ("#/s/long-0/tokens?t=60000", "tokens,"),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_views_load_without_errors(node: str, watched: Watched, scheme: Any) -> None:
    """Every view loads without an error and asks nobody else."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page = watched.page
    page.emulate_media(color_scheme=scheme)
    for name, (address, words) in VIEWS.items():
        page.goto(f"{node}/ui/{address}")
        expect(page.locator("main")).to_contain_text(words)
        page.screenshot(path=SHOTS / f"{name}-{scheme}.png")
    watched.is_clean(node)


def test_history_curve_matches_timeseries(node: str, watched: Watched) -> None:
    """The curve of the page draws the values of `/v1/timeseries`."""
    page = watched.page
    page.goto(f"{node}/ui/#/now")
    curve = page.locator(".history figure").filter(has_text="sessions in run")
    expect(curve.locator("polyline")).to_have_count(1, timeout=40_000)  # two samples, ten seconds apart
    found = answer(node, "/v1/timeseries")
    assert len(found["at"]) >= 2
    drawn = (curve.locator("polyline").get_attribute("points") or "").split()
    assert 2 <= len(drawn) <= len(found["at"])
    running = found["values"]["running"]
    expect(curve.locator("svg")).to_have_attribute(
        "aria-label", f"sessions in run: {running[-1]} now, at most {max(running)}"
    )
    page.screenshot(path=SHOTS / "history-light.png")
    watched.is_clean(node)


def test_fork_and_parent_are_linked(node: str, watched: Watched) -> None:
    page = watched.page
    page.goto(f"{node}/ui/#/groups")
    row = page.locator("tr", has=page.get_by_text("tree", exact=True))
    expect(row.locator(".dots circle")).to_have_count(1)
    expect(row.locator(".dots path.fork.usable")).to_have_count(2)
    row.get_by_role("link", name="sample 1: completed, reward 0.5; fork of tree-0 before turn 1").click()
    expect(page.locator("h1")).to_have_text("tree-1")
    parent = page.locator(".facts div", has_text="forked from")
    expect(parent).to_contain_text("tree-0 before turn 1, by replay")
    expect(page.locator(".panel", has_text="Forks")).to_have_count(0)
    parent.get_by_role("link", name="tree-0").click()
    expect(page.locator("h1")).to_have_text("tree-0")
    assert page.url.endswith("#/s/tree-0/conversation?turn=1")
    page.get_by_role("link", name="overview", exact=True).click()
    forks = page.locator(".panel", has=page.get_by_role("heading", name="Forks"))
    expect(forks.locator("tbody tr")).to_have_count(2)
    page.screenshot(path=SHOTS / "forks-light.png")
    forks.get_by_role("link", name="tree-2").click()
    expect(page.locator(".facts div", has_text="forked from")).to_contain_text(
        "in another state from turn 0 on: turn 0: "
    )
    watched.is_clean(node)


def test_unknown_session_is_explained(node: str, watched: Watched) -> None:
    watched.page.goto(f"{node}/ui/#/s/nothing")
    expect(watched.page.get_by_role("alert")).to_contain_text("no session 'nothing' is in the log")


@pytest.mark.parametrize("tab", ["overview", "conversation", "tokens", "compare"])
def test_hostile_text_is_never_run(node: str, watched: Watched, tab: str) -> None:
    page = watched.page
    page.goto(f"{node}/ui/#/s/parser-3/{tab}")
    shown = page.locator(
        {"overview": ".log", "conversation": "#turn-2", "tokens": ".token-room", "compare": ".side"}[tab]
    ).first
    expect(shown).to_contain_text("<script>document.title='owned'</script>")
    text = shown.inner_text()
    for part in ("onerror=", "ESC", "U+202E", "NUL", "javascript:alert(1)", "<svg onload"):
        assert part in text
    assert not {"\x1b", "\u202e", "\x00"} & set(page.content())
    assert page.title() == "parser-3 · polarnode"
    elements = page.evaluate(
        "[...document.querySelectorAll('#page img, #page script, #page iframe, #page [onload], #page [onerror]')].length"
    )
    assert elements == 0
    assert all(
        href.startswith("#/")
        for href in page.evaluate(
            "[...document.querySelectorAll('a')].map((each) => each.getAttribute('href'))"
        )
    )
    watched.is_clean(node)
    assert "\x1b" in HOSTILE


# ── tokens ────────────────────────────────────────────────────────────────────

COUNT = """
async () => {
  const box = document.querySelector(".token-box");
  const shades = new Map();
  for (let top = 0; ; top += box.clientHeight) {
    box.scrollTop = top;
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    for (const each of box.querySelectorAll("[data-i]")) shades.set(Number(each.dataset.i), each.classList.contains("m0"));
    if (top >= box.scrollHeight) break;
  }
  return [shades.size, [...shades].filter(([, shade]) => shade).map(([at]) => at).sort((a, b) => a - b)];
}
"""


@pytest.mark.parametrize(
    ("session", "row"), [("parser-1", 0), ("parser-1", 1), ("sliced-0", 1), ("long-0", 0)]
)
def test_page_tokens_equal_json_tokens(node: str, watched: Watched, session: str, row: int) -> None:
    trace = answer(node, f"/v1/trajectories/{session}?arrays=base64")["traces"][row]
    mask = b64decode(trace["loss_mask"])
    watched.page.goto(f"{node}/ui/#/s/{session}/tokens?row={row}")
    expect(watched.page.locator(".token-line").first).to_be_visible()
    count, trained = watched.page.evaluate(COUNT)
    assert count == len(mask)
    assert trained == [at for at, each in enumerate(mask) if each]
    watched.is_clean(node)


def test_hundred_thousand_tokens_few_elements(node: str, watched: Watched) -> None:
    page = watched.page
    page.goto(f"{node}/ui/#/s/long-0/tokens")
    expect(page.locator(".token-line").first).to_be_visible()
    counted = []
    for top in (0, 0.5, 1):
        page.evaluate(
            "(part) => { const box = document.querySelector('.token-box'); box.scrollTop = part * box.scrollHeight; }",
            top,
        )
        page.wait_for_timeout(100)
        counted.append(page.evaluate("document.getElementsByTagName('*').length"))
    assert max(counted) < 3000, counted
    assert min(counted) > 500, "there are tokens in view"


def test_token_shows_its_trajectory_data(node: str, watched: Watched) -> None:
    found = answer(node, "/v1/trajectories/parser-1")
    trace = found["traces"][0]
    (seam,) = (
        a["end"]
        for a, b in zip(trace["version_spans"], trace["version_spans"][1:], strict=False)
        if a["end"] == b["start"]
    )
    page = watched.page
    page.goto(f"{node}/ui/#/s/parser-1/tokens?t={seam}")
    expect(page.locator("aside")).to_contain_text("advantage")
    facts = dict(
        zip(
            page.locator("aside dt").all_inner_texts(),
            page.locator("aside dd").all_inner_texts(),
            strict=True,
        )
    )
    assert facts["token"] == str(seam)
    assert facts["id"] == str(trace["token_ids"][seam])
    assert (facts["weights"], facts["turn"], facts["trained"]) == ("step-8", "1", "yes")
    assert float(facts["logprob"]) == pytest.approx(trace["logprobs"][seam], abs=1e-3)
    group = answer(node, "/v1/groups?task_id=parser")["groups"][0]
    assert float(facts["advantage"]) == pytest.approx(group["advantages"][1], abs=1e-3)


def test_samples_compare_from_first_difference(node: str, watched: Watched) -> None:
    """Samples are compared from the first token that differs."""
    page = watched.page
    page.goto(f"{node}/ui/#/s/parser-1/compare")
    expect(page.locator(".sides .panel")).to_have_count(4)
    one, other = (answer(node, f"/v1/trajectories/parser-{at}")["traces"][0]["token_ids"] for at in (1, 0))
    common = next(at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    shown = page.locator(".panel", has_text="parser-0")
    expect(shown).to_contain_text(f"the first {common} tokens are the same; they part in or after turn 1")
    shown.get_by_role("link").click()
    expect(page.locator(".selected")).to_have_attribute("data-i", str(common))
    watched.is_clean(node)


def test_log_shown_without_terminal_codes(node: str, watched: Watched) -> None:
    watched.page.goto(f"{node}/ui/#/s/parser-3/log")
    shown = watched.page.locator(".log.whole")
    expect(shown).to_contain_text("starting\n100%\nKeyError: 'x'")
    expect(shown).to_contain_text("<script>")
    expect(shown).to_contain_text("U+202E")
    watched.is_clean(node)


def test_node_logs_are_followed_safely(node: str, state: Path, watched: Watched) -> None:
    """Logs of the node are followed, and nothing in them runs."""
    page = watched.page
    page.goto(f"{node}/ui/#/logs")
    shown = page.locator(".log.whole")
    expect(shown).to_contain_text("line 899 of the node")
    expect(shown).not_to_contain_text("line 399 of the node")  # the end of it
    with (state / "node.log").open("a") as file:
        file.write("one more <b onload='alert(1)'>line</b>\n")
    expect(shown).to_contain_text("one more <b onload='alert(1)'>line</b>")
    end = "(box) => box.scrollHeight - box.scrollTop - box.clientHeight"
    page.wait_for_function(f"({end})(document.querySelector('.log.whole')) < 2")
    page.get_by_placeholder("text").fill("LINE 899")
    expect(shown).to_have_text("line 899 of the node")
    page.get_by_placeholder("text").fill("")
    page.get_by_label("follow").uncheck()
    with (state / "node.log").open("a") as file:
        file.write("written while nobody follows\n")
    page.wait_for_timeout(3000)
    expect(shown).not_to_contain_text("nobody follows")
    page.get_by_label("follow").check()
    expect(shown).to_contain_text("nobody follows")
    page.get_by_role("link", name="engine-0").click()
    expect(shown).to_contain_text("ready\n")
    for part in ("<script>", "onerror=", "U+202E", "NUL", "<svg onload"):
        expect(shown).to_contain_text(part)
    assert (
        page.evaluate("[...document.querySelectorAll('#page img, #page script, #page [onload]')].length") == 0
    )
    page.reload()
    expect(shown).to_contain_text("ready\n")
    watched.is_clean(node)


# ── keyboard ──────────────────────────────────────────────────────────────────

FOCUSED = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"


def tab_to(page: Page, wanted: Callable[[str], bool]) -> None:
    for _ in range(80):
        page.keyboard.press("Tab")
        if wanted(page.evaluate(FOCUSED)):
            return
    raise AssertionError("the key Tab does not reach it")


def test_page_works_by_keyboard(node: str, watched: Watched) -> None:
    page = watched.page
    page.goto(f"{node}/ui/")
    tab_to(page, lambda name: name == "groups")
    page.keyboard.press("Enter")
    expect(page.locator(".dots").first).to_be_visible()
    tab_to(page, lambda name: name.startswith("sample 3: failed"))
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("parser-3")
    tab_to(page, lambda name: name == "tokens")
    page.keyboard.press("Enter")
    expect(page.locator(".token-line").first).to_be_visible()
    tab_to(page, lambda name: page.evaluate("document.activeElement.value") == "mask")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".modes .chosen")).to_have_text("probability")
    tab_to(page, lambda name: name == "tokens of the row")
    page.keyboard.press("v")
    expect(page.locator("aside")).to_contain_text("step-8")
    before = int(page.locator(".selected").get_attribute("data-i") or -1)
    page.keyboard.press("ArrowRight")
    expect(page.locator(".selected")).to_have_attribute("data-i", str(before + 1))
    watched.is_clean(node)


# ── what changes while one looks ──────────────────────────────────────────────


def test_stream_updates_sessions_and_groups(node: str, watched: Watched, context: BrowserContext) -> None:
    """A session appears and ends, and its group comes, by the stream."""
    groups = Watched(context.new_page())
    groups.watch()
    groups.page.goto(f"{node}/ui/#/groups")
    expect(groups.page.locator("main")).to_contain_text("parser")
    page = watched.page
    page.goto(f"{node}/ui/#/sessions")
    expect(page.locator("tbody tr")).to_have_count(2)
    submit(node, "seen", seconds=4)
    row = page.locator("tbody tr").filter(has_text="seen")
    expect(row.locator(".state")).to_have_text("run")
    expect(row.locator(".state")).to_have_text("completed")
    expect(row).to_have_count(0)  # some seconds later
    expect(page.locator("tbody tr")).to_have_count(2)
    assert [each for each in watched.asked if "/v1/status" in each] == [], "nothing is polled"
    expect(groups.page.locator("tbody")).to_contain_text("seen")
    watched.is_clean(node)
    groups.is_clean(node)


def test_blocked_stream_falls_back_to_polling(node: str, watched: Watched) -> None:
    """Where a proxy holds the stream, the status is asked for instead."""
    page = watched.page
    page.route("**/v1/sessions/live", lambda route: route.fulfill(status=502, body="bad gateway"))
    page.goto(f"{node}/ui/#/sessions")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.goto(f"{node}/ui/#/now")
    expect(page.locator("main")).to_contain_text("2 sessions are live")
    before = len([each for each in watched.asked if each.endswith("/v1/status")])
    page.wait_for_timeout(5000)
    assert len([each for each in watched.asked if each.endswith("/v1/status")]) >= before + 2
    assert {each for each in watched.problems if "502" not in each} == set()


def test_now_refreshes_only_on_changes(node: str, watched: Watched) -> None:
    page = watched.page
    page.goto(f"{node}/ui/#/now")
    expect(page.locator("main")).to_contain_text("2 sessions are live")
    page.wait_for_timeout(2500)  # the answer to the stream's first event
    before = len([each for each in watched.asked if each.endswith("/v1/status")])
    page.wait_for_timeout(5000)
    assert len([each for each in watched.asked if each.endswith("/v1/status")]) == before
    submit(node, "moved", seconds=4)
    expect(page.locator("main")).to_contain_text("3 sessions are live")
    expect(page.locator("main")).to_contain_text("2 sessions are live")
    watched.is_clean(node)


def test_fleet_page_lists_all_nodes(tmp_path: Path, watched: Watched) -> None:
    """A fleet's page lists the sessions and logs of all nodes."""
    page = watched.page
    with here() as thread:
        url = open_fleet_in_thread(thread, tmp_path, nodes=2, token=None)
        for name in ("node-0", "node-1"):
            (tmp_path / name / name / "node.log").write_text(f"of {name}\n")
        page.goto(f"{url}/ui/#/sessions")
        expect(page.locator("main")).to_contain_text("No session runs now.")
        for at in range(6):
            submit(url, f"fleet-{at}", seconds=600)
        expect(page.locator("tbody tr")).to_have_count(6)
        # the column of nodes is shown when the second node has answered
        expect(page.locator("tbody tr td:nth-child(2)", has_text="node-1").first).to_be_visible()
        nodes = set(page.locator("tbody tr td:nth-child(2)").all_inner_texts())
        assert nodes == {"node-0", "node-1"}
        page.screenshot(path=SHOTS / "fleet-sessions-light.png")
        page.locator("tbody a").first.click()
        expect(page.locator(".title")).to_contain_text("pending")
        page.goto(f"{url}/ui/#/logs")
        page.get_by_role("link", name="node-1/node").click()
        expect(page.locator(".log.whole")).to_have_text("of node-1\n")
        page.screenshot(path=SHOTS / "fleet-logs-light.png")
        page.goto(f"{url}/ui/#/now")
        expect(page.locator("main")).to_contain_text("6 sessions run on 2 nodes")
        page.screenshot(path=SHOTS / "fleet-now-light.png")
        watched.is_clean(url)
        page.goto("about:blank")


def test_token_asked_once_per_tab(locked_node: str, watched: Watched, context: BrowserContext) -> None:
    page = watched.page
    page.goto(f"{locked_node}/ui/#/groups")
    page.get_by_label("token").fill("another")
    page.keyboard.press("Enter")
    expect(page.get_by_label("token")).to_be_visible()
    page.get_by_label("token").fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_contain_text("parser")
    page.reload()
    expect(page.locator("main")).to_contain_text("parser")
    other = context.new_page()
    other.goto(f"{locked_node}/ui/")
    expect(other.get_by_label("token")).to_be_visible()
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]


# ── what it does ──────────────────────────────────────────────────────────────


def test_action_needs_confirmation_and_token(locked_node: str, watched: Watched) -> None:
    """A page that may act asks first, and acts with its token."""
    page = watched.page
    page.goto(f"{locked_node}/ui/#/now")
    page.get_by_label("token").fill(TOKEN)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="pause").click()
    expect(page.locator(".action")).to_contain_text("Hold every call of every session?")
    page.get_by_role("button", name="no").click()
    page.get_by_role("button", name="pause").click()
    page.get_by_role("button", name="pause").click()
    expect(page.locator("main")).to_contain_text("paused: in_place")
    page.get_by_role("button", name="resume").click()
    page.get_by_role("button", name="resume").click()
    expect(page.locator("main")).not_to_contain_text("paused: in_place")
    page.goto(f"{locked_node}/ui/#/sessions")
    page.locator("tbody a").first.click()
    page.get_by_role("button", name="cancel the task").click()
    page.get_by_role("button", name="cancel the task").click()
    expect(page.locator(".title")).to_contain_text("cancelled")
    expect(page.get_by_role("button")).to_have_count(0)
    assert [each for each in watched.problems if "401" not in each] == []


def test_read_only_page_offers_nothing(node: str, watched: Watched) -> None:
    watched.page.goto(f"{node}/ui/#/now")
    expect(watched.page.locator("main")).to_contain_text("Weights")
    expect(watched.page.get_by_role("button")).to_have_count(0)
    watched.is_clean(node)


# ── a file in place of a node ─────────────────────────────────────────────────


@pytest.fixture(scope="module")
def export(node: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trajectories of the node as a file."""
    found = tmp_path_factory.mktemp("export") / "trajectories.jsonl"
    with urllib.request.urlopen(f"{node}/v1/export?turns=full", timeout=60) as opened:
        found.write_bytes(opened.read())
    return found


def show_file(watched: Watched, url: str) -> None:
    """Use the page over a file as over a node."""
    page = watched.page
    page.goto(f"{url}/")
    expect(page.locator("nav").first).to_have_text("groups")
    page.get_by_role("link", name="sample 3: failed").click()
    expect(page.locator("main")).to_contain_text("KeyError: 'x'")
    for tab, words in (
        ("conversation", "I look at the code first."),
        ("compare", "tokens are the same"),
        ("tokens", "careful engineer"),
    ):
        page.get_by_role("link", name=tab, exact=True).click()
        expect(page.locator("main")).to_contain_text(words)
    page.get_by_role("link", name="row 1").click()
    page.get_by_label("advantage").check()
    expect(page.locator(".legend")).to_contain_text("no advantage")
    page.goto(f"{url}/#/s/tree-0/overview")
    expect(page.locator(".panel", has_text="Forks").locator("tbody tr")).to_have_count(2)
    page.goto(f"{url}/#/s/parser-0/tokens")
    expect(page.locator("h1")).to_have_text("parser-0")  # else the box of the session before gets the key
    expect(page.locator(".token-line").first).to_be_visible()
    page.locator(".token-box").focus()
    page.keyboard.press("t")
    expect(page.locator("aside")).to_contain_text("advantage")
    watched.is_clean(url)


def test_view_serves_file_without_node(export: Path, watched: Watched) -> None:
    command = [sys.executable, "-m", "polarnode.cli", "view", "--from", export, "--model", MODEL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        stop = threading.Timer(STARTED_S, process.kill)
        stop.start()
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split(" ")[2]
            show_file(watched, url.rstrip("/"))
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            stop.cancel()
            process.kill()


def test_bundle_works_on_any_server(export: Path, watched: Watched, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "polarnode.cli",
        "view",
        "--from",
        export,
        "--model",
        MODEL,
        "--bundle",
        tmp_path / "bundle",
    ]
    subprocess.run(command, check=True, timeout=STARTED_S)
    with open_files(tmp_path / "bundle") as port:
        show_file(watched, f"http://127.0.0.1:{port}")


# ── other sites ───────────────────────────────────────────────────────────────

ATTACK = """<!doctype html><title>attack</title><body><script>
const node = new URLSearchParams(location.search).get("node");
const tries = {
  read: () => fetch(node + "/v1/status").then((answer) => answer.text()),
  blind: () => fetch(node + "/v1/status", { mode: "no-cors" }),
  page: () => fetch(node + "/ui/", { mode: "no-cors" }),
  task: () => fetch(node + "/v1/tasks", { method: "POST", mode: "no-cors", body: '{"task_id": "attack", "instruction": "x", "harness": {"command": ["hollow", "0", "1"]}}' }),
  json: () => fetch(node + "/v1/tasks", { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" }),
  stream: () => new Promise((done, failed) => { const source = new EventSource(node + "/v1/trajectories/stream"); source.onopen = done; source.onerror = failed; }),
};
const results = {};
(async () => {
  for (const [name, attempt] of Object.entries(tries)) {
    try { const found = await attempt(); results[name] = typeof found === "string" ? found : found.type; } catch { results[name] = "refused"; }
  }
  for (const [name, element, at] of [["frame", "iframe", "/ui/"], ["script", "script", "/ui/main.js"], ["image", "img", "/ui/icon.svg"]]) {
    const made = document.createElement(element);
    const over = new Promise((done) => { made.onload = () => done("loaded"); made.onerror = () => done("refused"); });
    made.src = node + at;
    document.body.append(made);
    results[name] = await over;
  }
  window.results = results;
})();
</script>"""


@pytest.fixture
def attacker(tmp_path: Path) -> Iterator[int]:
    """A web server of another origin; its port."""
    (tmp_path / "index.html").write_text(ATTACK)
    with open_files(tmp_path) as port:
        yield port


@pytest.mark.parametrize("site", ["127.0.0.1", "localhost", "evil.example"])
@pytest.mark.parametrize("has_token", [False, True])
def test_cross_site_page_gets_nothing(
    node: str, locked_node: str, context: BrowserContext, attacker: int, site: str, has_token: bool
) -> None:
    """A page of another site gets nothing and does nothing."""
    url = locked_node if has_token else node
    page = context.new_page()
    statuses: dict[str, int] = {}
    page.on(
        "response",
        lambda each: (
            statuses.__setitem__(f"{each.request.method} {each.url}", each.status)
            if each.url.startswith(url)
            else None
        ),
    )
    page.goto(f"http://{site}:{attacker}/?node={url}")
    page.wait_for_function("window.results")
    results = page.evaluate("window.results")
    assert {results[name] for name in ("read", "json", "stream", "script", "image")} == {"refused"}
    assert {results[name] for name in ("blind", "page", "task")} <= {"refused", "opaque"}
    assert statuses, "the node was asked"
    assert set(statuses.values()) <= {403, 405}, statuses
    assert "polarnode" not in "".join(
        frame.content() for frame in page.frames[1:] if frame.url.startswith("http")
    )
    assert "attack" not in {each["task_id"] for each in answer(node, "/v1/tasks")["tasks"]}


def test_rebound_name_is_not_served(node: str, locked_node: str, context: BrowserContext) -> None:
    """DNS rebinding: the page's own name leads to the node, so that the browser takes both for one site."""
    page = context.new_page()
    port = node.rpartition(":")[2]
    found = page.goto(f"http://evil.example:{port}/ui/")
    assert found is not None
    assert found.status == 403
    assert page.evaluate("fetch('/v1/status').then((answer) => answer.status)") == 403
    # a node with a token serves any name, behind a proxy for instance: the token is what such a page lacks
    page.goto(f"http://evil.example:{locked_node.rpartition(':')[2]}/ui/")
    assert page.evaluate("fetch('/v1/status').then((answer) => answer.status)") == 401
    assert page.evaluate("sessionStorage.length") == 0
