// The pure parts of the page, with Node's own test runner: `node --test tests/web/`.
import assert from "node:assert/strict";
import { test } from "node:test";

const ui = new URL("../../polarnode/web/ui/", import.meta.url);
const [{ logLink, readRoute, sessionLink }, { linesWith, visible, visibleText, withoutEscapes }, format, row, colours, { timeline }, { tally }, { trainedShares }, { firstDifference, around, turnAt }, { tree, MOST }, { fileOf, filtered, isBundle }, { curve }, { series }, live, { warnings }] = await Promise.all(
  ["route", "text", "format", "row", "colours", "timeline", "tally", "minimap", "divergence", "tree", "bundle", "curve", "series", "live", "warnings"].map((name) => import(new URL(`${name}.js`, ui).href)),
);

const base64 = (array) => Buffer.from(array.buffer).toString("base64");

function trace(texts, { mask = texts.map(() => 0), logprobs = texts.map(() => 0), turns = [], versions = [] } = {}) {
  const json = {
    token_ids: base64(Int32Array.from(texts.keys())),
    loss_mask: base64(Uint8Array.from(mask)),
    logprobs: base64(Float32Array.from(logprobs)),
    turn_spans: turns,
    version_spans: versions,
    offset: 0,
  };
  return row.readRow(json, 0, { tokens: Object.fromEntries(texts.map((text, at) => [at, text])), clusters: [] });
}

test("an address is read as it was written, whatever is in the id", () => {
  for (const id of ["a", "a/b c", "%", "ü?#"]) {
    const found = readRoute(sessionLink(id, "tokens", { row: 1, t: 5 }));
    assert.deepEqual(found, { view: "session", id, tab: "tokens", query: { row: "1", t: "5" } });
  }
  assert.equal(readRoute("").view, "now");
  assert.equal(readRoute("#/nothing").view, "now");
  assert.equal(readRoute("#/s/x/nothing").tab, "overview");
  assert.equal(readRoute("#/s/%E0%A4%A").id, "%E0%A4%A");
});

test("the address of a log has its whole name, with its node", () => {
  assert.deepEqual(readRoute(logLink("node-1/engine-0")), { view: "logs", id: "node-1/engine-0", tab: "", query: {} });
  assert.equal(readRoute("#/logs").id, "");
  assert.deepEqual(readRoute("#/logs/x", ["groups"]), { view: "groups", id: "", tab: "", query: {} });
});

test("live sessions are those of the last whole list and what changed since, by node", () => {
  const one = { session_id: "a", phase: "init", age_s: 1, phase_s: 1, last_turn_s: null };
  let rows = live.changed(new Map(), { node: "n", sessions: [one, { ...one, session_id: "b" }], whole: true }, 0);
  rows = live.changed(rows, { node: "m", sessions: [one], whole: true }, 0);
  assert.deepEqual([...rows.keys()], ["n/a", "n/b", "m/a"]);
  rows = live.changed(rows, { node: "n", sessions: [{ ...one, phase: "run" }, { ...one, session_id: "b", phase: "ended", outcome: "failed" }], whole: false }, 1000);
  assert.equal(rows.get("n/a").status.phase, "run");
  assert.equal(rows.get("n/b").status.outcome, "failed");
  rows = live.changed(rows, { node: "n", sessions: [], whole: true }, 2000);
  assert.deepEqual([...rows.keys()], ["n/b", "m/a"], "one that ended is seen for a while");
  assert.deepEqual([...live.changed(rows, { node: "m", sessions: [], whole: false }, 60_000).keys()], ["m/a"]);
});

test("seconds go on from when they were told, and stand still at the end", () => {
  const row = { status: { phase: "run", age_s: 5, last_turn_s: null }, node: "n", heard: 1000 };
  assert.equal(live.seconds(row, "age_s", 3000), 7);
  assert.equal(live.seconds(row, "age_s", 0), 5, "a clock that was set back");
  assert.equal(live.seconds(row, "last_turn_s", 3000), null);
  assert.equal(live.seconds({ ...row, status: { phase: "ended", age_s: 5 } }, "age_s", 9000), 5);
});

test("a status stands for the stream where there is none, captures too", () => {
  const rows = live.ofStatus({ node: "n", sessions: [{ session_id: "a", phase: "run" }], captures: { open: [{ session_id: "c" }] } }, 0);
  assert.deepEqual([...rows].map(([key, row]) => [key, row.status.harness]), [["n/a", undefined], ["n/c", "capture"]]);
  assert.equal(live.ofStatus({ nodes: [] }, 0).size, 0);
});

test("lines of a log are chosen by a text", () => {
  assert.equal(linesWith("a ERROR\nb\nerror c", "error"), "a ERROR\nerror c");
  assert.equal(linesWith("a\nb", ""), "a\nb");
});

test("hidden characters have a name, and nothing else is changed", () => {
  assert.deepEqual(visible("a\u001b[31m\u202eb\ufeff"), ["a", { mark: "ESC" }, "[31m", { mark: "U+202E" }, "b", { mark: "U+FEFF" }]);
  assert.deepEqual(visible("é ☃ 日本 👍\n\t<b>"), ["é ☃ 日本 👍\n\t<b>"]);
  assert.equal(visibleText("\u0000\u007f\u0085\u{e0041}"), "‹NUL›‹DEL›‹U+0085›‹U+E0041›");
  for (const code of [0x200b, 0x200e, 0x2028, 0x2066, 0x2069, 0x061c, 0x00ad]) {
    assert.equal(visible(String.fromCharCode(code)).length, 1);
    assert.ok(visible(String.fromCharCode(code))[0].mark, code.toString(16));
  }
});

test("numbers are written as people read them", () => {
  assert.equal(format.duration(null), "–");
  assert.equal(format.duration(9.94), "9.9 s");
  assert.equal(format.duration(125), "2 min 05 s");
  assert.equal(format.duration(7384), "2 h 03 min");
  assert.equal(format.reward(0.25), "0.25");
  assert.equal(format.reward(1), "1");
  assert.equal(format.bytes(1458176), "1.5 MB");
  assert.deepEqual(format.meanAndSpread([1, null, 0]), { mean: 0.5, spread: Math.SQRT1_2 });
  assert.deepEqual(format.meanAndSpread([null]), { mean: null, spread: null });
});

test("lines hold every token once, end at line feeds, and are no wider than they may be", () => {
  const texts = ["ab", "c\n", "x".repeat(30), "日本", "", "d"].map((text) => text.replace("\n", "⏎"));
  const starts = row.cutLines(texts, 10);
  assert.deepEqual([...starts], [0, 2, 3]);
  const many = Array.from({ length: 5000 }, (_, at) => (at % 17 ? "word " : "end⏎"));
  const found = row.cutLines(many, 40);
  for (let at = 1; at < found.length; at += 1) {
    assert.ok(found[at] > found[at - 1]);
    assert.ok(many.slice(found[at - 1], found[at]).join("").length <= 40);
  }
  for (const token of [0, 1, 999, 4999]) {
    const line = row.lineOf(found, token);
    assert.ok(found[line] <= token && token < (found[line + 1] ?? many.length));
  }
  assert.deepEqual([...row.cutLines([], 10)], []);
});

test("a cluster's first token has its letter", () => {
  const json = { ...trace(["a", "b", "c"]).trace };
  const found = row.readRow(json, 1, { tokens: { 0: "a" }, clusters: [{ trace: 1, start: 1, end: 3, text: "é" }, { trace: 0, start: 0, end: 1, text: "no" }] });
  assert.deepEqual(found.texts, ["a", "é", ""]);
});

test("text is found across tokens, from a place on and around the end", () => {
  const made = trace(["Hello", " wor", "ld", " hello"]);
  assert.equal(row.findText(made, "world", 0), 1);
  assert.equal(row.findText(made, "HELLO", 1), 3);
  assert.equal(row.findText(made, "hello", 4), 0);
  assert.equal(row.findText(made, "nothing", 0), -1);
});

test("jumps and details are of the token they name", () => {
  const turns = [{ turn: 0, start: 1, end: 3, reward: null }, { turn: 4, start: 4, end: 6, reward: null }];
  const versions = [{ version: "a", start: 1, end: 3 }, { version: "a", start: 4, end: 5 }, { version: "b", start: 5, end: 6 }];
  const made = trace([..."abcdef"], { mask: [0, 1, 1, 0, 1, 1], logprobs: [0, -1, -3, 0, -2, -0.5], turns, versions });
  assert.equal(row.leastLikely(made), 2);
  assert.deepEqual(row.seams(made), [5]);
  assert.equal(row.nextPlace([1, 4], 1), 4);
  assert.equal(row.nextPlace([1, 4], 4), 1);
  assert.equal(row.nextPlace([], 4), -1);
  const facts = colours.factsOf(made, 5);
  assert.deepEqual([facts.turn, facts.version, facts.trained, facts.logprob], [4, "b", true, -0.5]);
  assert.equal(colours.factsOf(made, 3).probability, null);
});

test("colours cover the tokens of their spans and no others", () => {
  const turns = [{ turn: 0, start: 1, end: 3, reward: null }];
  const versions = [{ version: "a", start: 1, end: 2 }, { version: "b", start: 2, end: 3 }];
  const made = trace([..."abcd"], { mask: [0, 1, 1, 0], logprobs: [0, 0, -9, 0], turns, versions });
  const of = (mode, advantage = null) => [...colours.colours(mode, made, advantage).classes];
  assert.deepEqual(of("mask"), [-1, 0, 0, -1]);
  assert.deepEqual(of("probability"), [-1, 0, 11, -1]);
  assert.deepEqual(of("version"), [-1, 0, 1, -1]);
  assert.deepEqual(of("turn"), [-1, 0, 0, -1]);
  assert.deepEqual(of("advantage"), [-1, -1, -1, -1]);
  assert.deepEqual(of("advantage", -9), [-1, 0, 0, -1]);
  assert.deepEqual(of("advantage", 0), [-1, 3, 3, -1]);
  for (const mode of colours.MODES) assert.ok(colours.legend(mode, made, 1).length);
});

test("a timeline's bars are within the session, and lineages are lanes", () => {
  const turn = (index, started, lineage, versions) => ({
    index, lineage, role: "main", state: "complete", weight_versions: versions, timing: { started, first_token_s: 0.1, ended_s: 1 },
  });
  const found = timeline({ init_s: 2, ready_s: 0, run_s: 10, post_s: 3 }, [turn(0, 100, 0, ["a"]), turn(1, 103, 2, ["b"]), turn(2, 105, 0, ["b"])]);
  assert.equal(found.seconds, 15);
  assert.equal(found.lanes, 2);
  assert.deepEqual(found.turns.map((bar) => bar.lane), [0, 1, 0]);
  assert.deepEqual(found.phases.map((phase) => phase.name), ["init", "run", "post"]);
  assert.equal(found.seams.length, 1);
  for (const bar of [...found.turns, ...found.phases]) assert.ok(bar.x >= 0 && bar.x + bar.width <= 1 + 1e-9);
  assert.equal(timeline(null, []).turns.length, 0);
});

test("groups are counted by state, and those that teach nothing", () => {
  const member = (reward, usable = true) => ({ reward, usable });
  const groups = [
    { state: "complete", sessions: [member(1), member(1)] },
    { state: "partial", sessions: [member(1), member(0), member(null, false)] },
    { state: "dropped", sessions: [member(0)] },
  ];
  assert.equal(tally(groups), "3 groups: 1 complete, 1 partial, 1 dropped; 1 with equal rewards, which teach nothing");
  assert.equal(tally([]), "");
});

test("a minimap's shares are those of the mask", () => {
  assert.deepEqual([...trainedShares(Uint8Array.of(0, 0, 1, 1), 2)], [0, 1]);
  assert.deepEqual([...trainedShares(Uint8Array.of(1, 0), 4)], [1, 1, 0, 0]);
});

test("a log is shown without the terminal's commands", () => {
  assert.equal(withoutEscapes("\u001b[1;31mred\u001b[0m\u001b]0;title\u0007 10%\r 20%\nnext\r\nlast"), " 20%\nnext\nlast");
  assert.equal(withoutEscapes("plain é\n"), "plain é\n");
});

test("the first difference of two rows is exact", () => {
  assert.equal(firstDifference(Int32Array.of(1, 2, 3), Int32Array.of(1, 2, 4)), 2);
  assert.equal(firstDifference(Int32Array.of(1, 2), Int32Array.of(1, 2, 4)), 2);
  assert.equal(firstDifference(Int32Array.of(), Int32Array.of(1)), 0);
  const made = trace([..."abcdef"], { turns: [{ turn: 0, start: 1, end: 2 }, { turn: 3, start: 4, end: 5 }] });
  assert.deepEqual(around(made, 3, 2, 2), { before: "bc", after: "de", more: true });
  assert.equal(turnAt(made, 0), null);
  assert.equal(turnAt(made, 3), 0);
  assert.equal(turnAt(made, 5), 3);
});

const node = (index, parent, more = {}) => ({ index, parent, kind: "extend", left_out: null, state: "complete", ...more });

test("a tree of turns has a lane for each leaf, and every turn once", () => {
  const turns = [node(0, null), node(1, 0), node(2, 1), node(3, null), node(4, 2), node(5, 1, { kind: "branch" })];
  const { nodes, lanes, columns } = tree(turns);
  assert.deepEqual(nodes.map((each) => each.turn.index).sort(), [0, 1, 2, 3, 4, 5]);
  assert.equal(lanes, 3);
  assert.equal(columns, 4);
  const lane = Object.fromEntries(nodes.map((each) => [each.turn.index, each.lane]));
  assert.notEqual(lane[4], lane[5]);
  assert.equal(new Set(nodes.map((each) => `${each.column} ${each.lane}`)).size, nodes.length);
  for (const each of nodes) if (each.parent !== null) assert.equal(nodes[each.parent].last.index, each.turn.parent);
  assert.equal(tree([node(7, 6)]).nodes.length, 1); // its parent is damaged
});

test("of many turns, those that only extend are one node, however many", () => {
  const turns = Array.from({ length: 20_000 }, (_, index) => node(index, index ? index - 1 : null, index === 10_000 ? { kind: "retry" } : {}));
  const { nodes } = tree(turns);
  assert.ok(turns.length > MOST);
  assert.deepEqual(nodes.map((each) => [each.turn.index, each.count]), [[0, 10_000], [10_000, 10_000]]);
});

test("a bundle has a file for each path, and filters as a node does", () => {
  assert.equal(fileOf("/v1/trajectories/a?arrays=base64&pieces=true").file, "data/trajectories/a.json");
  assert.equal(fileOf("/v1/status").file, "data/status.json");
  const groups = [{ task_id: "a", state: "complete" }, { task_id: "b", state: "partial" }];
  assert.deepEqual(filtered("/v1/groups?limit=100", { groups }).groups, groups);
  assert.deepEqual(filtered("/v1/groups?task_id=b", { groups }).groups, [groups[1]]);
  assert.deepEqual(filtered("/v1/groups?state=complete", { groups }).groups, [groups[0]]);
  assert.ok(isBundle({ dataset: { bundle: "" } }));
  assert.ok(!isBundle({ dataset: {} }));
});

test("rewards and weight updates stand on one axis of time", () => {
  const groups = [{ task_id: "b", ended: 20, rewards: [1, 1] }, { task_id: "a", ended: 10, rewards: [0, null] }, { task_id: "c", ended: 30, rewards: [null] }];
  const found = curve(groups, [{ version: "v1", at: 15 }, { version: "v0", at: 5 }], { low: 0, high: 1 });
  assert.deepEqual(found.dots.map((dot) => [dot.task, dot.x, dot.y]), [["a", 0, 1], ["b", 1, 0]]);
  assert.deepEqual(found.line.map((point) => point.y), [1, 0.5]);
  assert.deepEqual(found.updates, [{ version: "v1", x: 0.5 }]);
  assert.equal(curve(groups.slice(0, 1), [], { low: 0, high: 1 }), null);
  assert.equal(curve([{ ended: null, rewards: [1] }], [], { low: 0, high: 1 }), null);
});

test("a series breaks where there is no value and where nothing was sampled", () => {
  const found = series([0, 10, 20, 30, 100], [1, null, 2, 4, 0], 10);
  assert.deepEqual(found.lines, [[{ x: 0, y: 0.75 }], [{ x: 0.2, y: 0.5 }, { x: 0.3, y: 0 }], [{ x: 1, y: 1 }]]);
  assert.deepEqual([found.most, found.last], [4, 0]);
  assert.deepEqual(series([5], [1], 10), { lines: [], most: 1, last: 1 });
  assert.deepEqual(series([], [], 10), { lines: [], most: 0, last: null });
  assert.deepEqual(series([0, 10], [0, 0], 10).lines, [[{ x: 0, y: 1 }, { x: 1, y: 1 }]]);
});

test("what is left out is said by reason", () => {
  assert.equal(format.leftOut({ left_out: { auxiliary: 1, length: 2 }, left_out_tokens: { auxiliary: 12, length: 1500 } }), "auxiliary 12 in 1 turn, length 1,500 in 2 turns");
  for (const figures of [undefined, {}, { left_out: {} }]) assert.equal(format.leftOut(figures), "");
});

test("a log that is away and nodes that are stale are said, each thing once", () => {
  const status = {
    log: { away: null },
    weights: { stale: [], warning: "same" },
    journal: { warning: "same" },
    scheduler: { stages: { init: { held_back: null } } },
    engine: { hosts: [{ index: 1, last_error: "x" }] },
    callbacks: { trouble: {} },
  };
  assert.deepEqual(warnings(status), ["same", "engine host 1: x"]);
  status.log.away = "no route";
  status.weights.stale = ["b", "c"];
  const found = warnings(status);
  assert.match(found[0], /^the log is away \(no route\)/);
  assert.equal(found[1], "not the current weights, so they take no sessions: b, c");
  delete status.log; // of an older bundle
  delete status.weights.stale;
  assert.equal(warnings(status).length, 2);
});
