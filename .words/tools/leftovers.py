"""Uses of names that no definition has any more: leftovers.py ROOT TABLE [--fix]

For each renamed simple name that is defined nowhere in the tree now: its uses as a Python name or attribute, and in strings of tests (monkeypatch).
"""
import ast, json, re, sys, tokenize, io
from collections import defaultdict
from pathlib import Path

ROOT, TABLE, fix = Path(sys.argv[1]), Path(sys.argv[2]), "--fix" in sys.argv
files = [p for top in ("polarnode", "tests", "benchmarks", "tools", "examples", "runtimes") for p in (ROOT / top).rglob("*.py") if ".venv" not in p.parts]
trees = {p: ast.parse(p.read_text()) for p in files}
news = defaultdict(set)
for line in TABLE.read_text().splitlines():
    if line.strip():
        e = json.loads(line)
        old = e["name"].split(".")[-1]
        if old != e["new"]:
            news[old].add(e["new"])
defined = set()
import builtins
defined |= set(dir(builtins))
params = set()
for p, t in trees.items():
    for n in ast.walk(t):
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(n.name)
        elif isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
            defined.add(n.id)
        elif isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store):
            defined.add(n.attr)
        elif isinstance(n, ast.arg):
            defined.add(n.arg)
        elif isinstance(n, ast.alias):
            if n.asname: defined.add(n.asname)
imported = set()
for p, t in trees.items():
    for n in ast.walk(t):
        if isinstance(n, ast.ImportFrom) and not (n.module or "").startswith("polarnode") :
            imported |= {a.name for a in n.names}
gone = {o for o in news if o not in defined}
total = 0
for p in files:
    text = p.read_text()
    if not any(o in text for o in gone):
        continue
    lines = text.split("\n")
    hits = []
    for n in ast.walk(trees[p]):
        if isinstance(n, ast.Attribute) and n.attr in gone:
            hits.append((n.end_lineno, n.attr, "attr", n.end_col_offset))
        elif isinstance(n, ast.Name) and n.id in gone:
            hits.append((n.lineno, n.id, "name", n.end_col_offset))
        elif isinstance(n, ast.keyword) and n.arg in gone:
            hits.append((n.lineno, n.arg, "kw", n.col_offset + len(n.arg)))
        elif isinstance(n, ast.alias) and n.name in gone:
            hits.append((n.lineno, n.name, "import", None))
        elif isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value.split(".")[-1].split(":")[-1] in gone and re.fullmatch(r"[\w.:]+", n.value):
            hits.append((n.end_lineno, n.value, "str", None))
    for line, name, kind, end in sorted(hits, key=lambda h: (h[0], h[3] or 0), reverse=True):
        total += 1
        old = name.split(".")[-1].split(":")[-1]
        options = news[old]
        print(f"{p.relative_to(ROOT)}:{line}: {kind} {name} -> {'|'.join(sorted(options))}: {lines[line-1].strip()[:100]}")
        if fix and len(options) == 1 and (kind != "str" or "monkeypatch" in lines[line-1] or "setattr" in lines[line-1] or (old.isupper() and "tests" in str(p)) or old.startswith("_")):
            (new,) = options
            if end is not None:
                raw = lines[line-1].encode()
                if raw[end-len(old):end].decode() == old:
                    lines[line-1] = (raw[:end-len(old)] + new.encode() + raw[end:]).decode()
            else:
                lines[line-1] = re.sub(rf"\b{old}\b", new, lines[line-1])
    if fix:
        p.write_text("\n".join(lines))
print(total, "leftovers;", len(gone), "names gone of", len(news))
