"""rename_tests.py ROOT TABLE: names and docstrings of test functions."""
import ast, json, re, sys
from collections import defaultdict
from pathlib import Path
ROOT = Path(sys.argv[1])
by = defaultdict(list)
for line in Path(sys.argv[2]).read_text().splitlines():
    if line.strip():
        e = json.loads(line); by[e["path"]].append(e)
done = bad = 0
for path, entries in by.items():
    p = ROOT / path
    if not p.exists():
        print("no file", path); bad += len(entries); continue
    text = p.read_text()
    tree = ast.parse(text)
    defs = defaultdict(list)
    for n in ast.walk(tree):
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)):
            defs[n.name].append(n)
    lines = text.split("\n")
    inserts = []
    taken = set(defs)
    for e in entries:
        old, new = e["old"], e["new"]
        nodes = defs.get(old, [])
        if old == new: continue
        if len(nodes) != 1 or new in taken or not re.fullmatch(r"test_[a-z0-9_]+", new):
            print("bad", path, old, new, len(nodes), new in taken); bad += 1; continue
        (n,) = nodes
        if any("given" in ast.unparse(d) for d in n.decorator_list):
            continue
        taken.add(new)
        lines[n.lineno-1] = re.sub(rf"\b{old}\b", new, lines[n.lineno-1], count=1)
        doc = e.get("doc")
        if doc and ast.get_docstring(n) is None:
            first = n.body[0]
            line = first.lineno - 1
            if first.lineno == n.lineno: continue
            if isinstance(first, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and first.decorator_list:
                line = first.decorator_list[0].lineno - 1
            while lines[line-1].strip().startswith("#"):
                line -= 1
            indent = " " * (n.col_offset + 4)
            doc = doc.replace("\\", "\\\\") if "\\" in doc else doc
            inserts.append((line, f'{indent}"""{doc}"""'))
        # other uses of the name in the file
        for i, l in enumerate(lines):
            if i != n.lineno-1 and re.search(rf"\b{old}\b", l):
                lines[i] = re.sub(rf"\b{old}\b", new, l)
        done += 1
    for line, s in sorted(inserts, reverse=True):
        lines.insert(line, s)
    p.write_text("\n".join(lines))
    ast.parse(p.read_text())
print(done, "renamed", bad, "bad")
