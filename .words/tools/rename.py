"""Apply a table of renames through the ty language server: rename.py ROOT TABLE [--log FILE]

Each line of TABLE: {"path", "name": qualified name in that file, "new"}. Earlier renames of the same table may have changed outer names.
"""
import ast, json, os, re, subprocess, sys, time
from collections import defaultdict
from pathlib import Path

ROOT = Path(sys.argv[1]).resolve()
TABLE = Path(sys.argv[2])
TY = "@T@/tools/bin/ty"


class Server:
    def __init__(self):
        self.p = subprocess.Popen([TY, "server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open("@T@/words/ty.err", "w"), cwd=ROOT)
        self.n = 0

    def send(self, message):
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.p.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self.p.stdin.flush()

    def read(self):
        length = 0
        while (line := self.p.stdout.readline().strip()):
            if line.lower().startswith(b"content-length"):
                length = int(line.split(b":")[1])
        if not length:
            raise SystemExit("ty ended: " + open("@T@/words/ty.err").read()[-2000:])
        return json.loads(self.p.stdout.read(length))

    def request(self, method, params):
        self.n += 1
        me = self.n
        self.send({"id": me, "method": method, "params": params})
        while True:
            m = self.read()
            if "method" in m and "id" in m:  # a request of the server's
                result = None
                if m["method"] == "workspace/configuration":
                    result = [{} for _ in m["params"]["items"]]
                self.send({"id": m["id"], "result": result})
            elif m.get("id") == me and "method" not in m:
                if "error" in m:
                    raise RuntimeError(m["error"]["message"])
                return m["result"]

    def notify(self, method, params):
        self.send({"method": method, "params": params})


def uri(path):
    return (ROOT / path).as_uri()


def col(text_line, byte_offset):
    return len(text_line.encode()[:byte_offset].decode())


def find(path, qualified):
    """(line, column) of the name in its definition, 0-based."""
    source = (ROOT / path).read_text()
    lines = source.split("\n")
    tree = ast.parse(source)
    *outer, last = qualified.split(".")
    scope = [tree]
    for name in outer:
        scope = [c for s in scope for c in ast.walk(s) if c is not s and isinstance(c, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and c.name == name]
        if not scope:
            raise LookupError(f"{path}: no {name} of {qualified}")
        scope = scope[:1]
    (scope,) = scope[:1]

    def own(node):
        for c in ast.iter_child_nodes(node):
            yield c
            if not isinstance(c, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield from own(c)

    for c in own(scope):
        if isinstance(c, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and c.name == last:
            line = c.lineno - 1
            m = re.compile(r"(?:def|class)\s+(" + re.escape(last) + r")\b").search(lines[line], col(lines[line], c.col_offset))
            return line, m.start(1)
        if isinstance(c, ast.Name) and isinstance(c.ctx, ast.Store) and c.id == last:
            return c.lineno - 1, col(lines[c.lineno - 1], c.col_offset)
    for c in ast.walk(scope):  # self.x = …
        if isinstance(c, ast.Attribute) and isinstance(c.ctx, ast.Store) and c.attr == last:
            line = c.end_lineno - 1
            return line, col(lines[line], c.end_col_offset) - len(last)
    raise LookupError(f"{path}: no {qualified}")


def apply(edit):
    by_file = defaultdict(list)
    for u, edits in (edit.get("changes") or {}).items():
        by_file[u] += edits
    for change in edit.get("documentChanges") or []:
        by_file[change["textDocument"]["uri"]] += change["edits"]
    for u, edits in by_file.items():
        path = Path(u.removeprefix("file://"))
        if ROOT not in path.parents or ".venv" in path.parts:
            raise RuntimeError(f"an edit outside: {path}")
    for u, edits in by_file.items():
        path = Path(u.removeprefix("file://"))
        lines = path.read_text().split("\n")
        seen = set()
        for e in sorted(edits, key=lambda e: (e["range"]["start"]["line"], e["range"]["start"]["character"]), reverse=True):
            s, t = e["range"]["start"], e["range"]["end"]
            if (s["line"], s["character"]) in seen:
                continue
            seen.add((s["line"], s["character"]))
            assert s["line"] == t["line"], e
            line = lines[s["line"]]
            lines[s["line"]] = line[: s["character"]] + e["newText"] + line[t["character"] :]
        path.write_text("\n".join(lines))
    return list(by_file)


def main():
    entries = [json.loads(l) for l in TABLE.read_text().splitlines() if l.strip()]
    seen = set()
    unique = []
    for e in entries:
        key = (e["path"], e["name"])
        if key in seen or e["name"].split(".")[-1] == e["new"]:
            continue
        seen.add(key)
        unique.append(e)
    renamed = {}  # (path, qualified old) -> new simple name
    s = Server()
    r = s.request("initialize", {
        "processId": os.getpid(), "rootUri": ROOT.as_uri(), "workspaceFolders": [{"uri": ROOT.as_uri(), "name": "r"}],
        "capabilities": {"general": {"positionEncodings": ["utf-32", "utf-16"]}, "workspace": {"workspaceEdit": {"documentChanges": False}, "didChangeWatchedFiles": {"dynamicRegistration": True}, "configuration": True},
                         "textDocument": {"rename": {"prepareSupport": True}}},
    })
    assert r["capabilities"]["positionEncoding"] == "utf-32", r["capabilities"]
    s.notify("initialized", {})
    done = failed = 0
    t0 = time.time()
    opened = set()
    versions = defaultdict(int)
    for e in unique:
        path, parts = e["path"], e["name"].split(".")
        now = []
        for i, part in enumerate(parts[:-1]):
            now.append(renamed.get((path, ".".join(parts[: i + 1])), part))
        current = ".".join([*now, parts[-1]])
        try:
            line, character = find(path, current)
            if path not in opened:
                opened.add(path)
                versions[uri(path)] += 1
                s.notify("textDocument/didOpen", {"textDocument": {"uri": uri(path), "languageId": "python", "version": versions[uri(path)], "text": (ROOT / path).read_text()}})
            edit = s.request("textDocument/rename", {"textDocument": {"uri": uri(path)}, "position": {"line": line, "character": character}, "newName": e["new"]})
            if not edit:
                raise RuntimeError("the server gives no edit")
            files = apply(edit)
        except (LookupError, RuntimeError, AttributeError) as error:
            failed += 1
            print("FAILED", json.dumps(e), error, flush=True)
            continue
        renamed[(path, e["name"])] = e["new"]
        for u in files:
            p = str(Path(u.removeprefix("file://")).relative_to(ROOT))
            if p in opened:
                versions[u] += 1
                s.notify("textDocument/didChange", {"textDocument": {"uri": u, "version": versions[u]}, "contentChanges": [{"text": (ROOT / p).read_text()}]})
        s.notify("workspace/didChangeWatchedFiles", {"changes": [{"uri": u, "type": 2} for u in files]})
        done += 1
        if done % 50 == 0:
            print(f"{done} of {len(unique)}, {time.time() - t0:.0f} s", flush=True)
    print(f"{done} renamed, {failed} failed, {time.time() - t0:.0f} s")
    s.p.kill()


main()
