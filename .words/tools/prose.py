"""prose.py ROOT TABLE…: old identifiers in comments, docstrings and docs."""
import ast,io,json,re,sys,tokenize
from collections import defaultdict
from pathlib import Path
ROOT=Path(sys.argv[1]); news=defaultdict(set)
for t in sys.argv[2:]:
    for l in Path(t).read_text().splitlines():
        if l.strip():
            e=json.loads(l); o=e["name"].split(".")[-1]
            if o!=e["new"]: news[o].add(e["new"])
defined=set()
files=[p for top in ("polarnode","tests","benchmarks","tools","examples") for p in (ROOT/top).rglob("*.py")]
src={p:p.read_text() for p in files}
for p in files:
    for n in ast.walk(ast.parse(src[p])):
        if isinstance(n,(ast.FunctionDef,ast.AsyncFunctionDef,ast.ClassDef)): defined.add(n.name)
        elif isinstance(n,ast.Name) and isinstance(n.ctx,ast.Store): defined.add(n.id)
        elif isinstance(n,ast.Attribute) and isinstance(n.ctx,ast.Store): defined.add(n.attr)
        elif isinstance(n,ast.arg): defined.add(n.arg)
EXCLUDE={"jsonl","against","CONNECT","OPTIONS","NONE","COMMIT","LEVEL","apply_patch","local_shell","tool_call","additional_tools","agent_message","judged_again","read","put","run","name","model","tasks","turn"}
gone={o:next(iter(n)) for o,n in news.items() if o not in defined and len(n)==1 and o not in EXCLUDE}
def fix(text,md=False):
    def tick(m):
        body=m.group(1)
        if md and not re.search(r"[.:_()/]|^[A-Z]",body): return m.group()
        return "`"+re.sub(r"(?<![-])\b[A-Za-z_]\w*\b(?!\.py)",lambda w: gone.get(w.group(),w.group()) if (w.group()[0]=="_" or w.group().isupper() or not md or "." in body or ":" in body) else w.group(),body)+"`"
    text=re.sub(r"`([^`\n]+)`",tick,text)
    if not md:
        text=re.sub(r"(?<![`'\"\w.-])([A-Z][A-Z0-9]*_[A-Z0-9_]+|_[a-z]\w+)\b",lambda m: gone.get(m.group(1),m.group(1)),text)
    return text
n=0
for p in files:
    L=src[p].split("\n"); prev=None; ch=False
    for t in tokenize.generate_tokens(io.StringIO(src[p]).readline):
        doc=t.type==tokenize.STRING and t.string.lstrip("r").startswith('"""') and (prev is None or prev.type in (tokenize.NEWLINE,tokenize.INDENT,tokenize.NL,tokenize.COMMENT,tokenize.ENCODING))
        if t.type==tokenize.COMMENT or doc:
            for r in range(t.start[0]-1,t.end[0]):
                a=t.start[1] if r==t.start[0]-1 else 0
                new=L[r][:a]+fix(L[r][a:])
                if new!=L[r]: L[r]=new; ch=True; n+=1
        prev=t
    if ch: p.write_text("\n".join(L))
for p in [ROOT/"docs/architecture.md",ROOT/"docs/fleet.md"]:
    s=p.read_text(); k=fix(s,True)
    if k!=s: p.write_text(k); n+=1; print(p.name)
print(n,len(gone))
