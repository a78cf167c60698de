import ast,json,re,subprocess,sys
from collections import defaultdict
from pathlib import Path
ROOT=Path(sys.argv[1]); p=ROOT/"tests/kits/mutant_rules.py"; src=p.read_text(); tree=ast.parse(src)
news=defaultdict(list)
for t in sys.argv[2:]:
    for l in Path(t).read_text().splitlines():
        if l.strip():
            e=json.loads(l); news[e["name"].split(".")[-1]].append(e["new"])
lines=src.encode().split(b"\n")
starts=[0]
for l in lines: starts.append(starts[-1]+len(l)+1)
raw=src.encode(); edits=[]; bad=0
def text(n):
    try: return ast.literal_eval(n)
    except Exception: return None
jobs=[]
for c in ast.walk(tree):
    if isinstance(c,ast.Call) and isinstance(c.func,ast.Name) and c.func.id=="rules":
        mod="polarnode."+text(c.args[0])
        jobs+=[(mod,t.elts[1],t.elts[2]) for t in c.args[1:] if isinstance(t,ast.Tuple)]
print(len(jobs),"mutants")
for mod,old,new in jobs:
    o,w=text(old),text(new)
    f=ROOT/(mod.replace(".","/")+".py"); f=f if f.is_file() else ROOT/mod.replace(".","/")/"__init__.py"
    s=f.read_text()
    if s.count(o)==1: continue
    words=set(re.findall(r"\w+",s))
    def sub(x):
        return re.sub(r"\b[A-Za-z_]\w*\b",lambda m: next((n for n in news.get(m.group(),()) if m.group() not in words and n in words),m.group()),x)
    o2,w2=sub(o),sub(w)
    if s.count(o2)!=1:
        # whitespace-insensitive search
        pat=r"\s*".join(re.escape(t) for t in re.findall(r"\w+|[^\w\s]",o2))
        m=re.findall(pat,s)
        if len(m)==1: o2=m[0]
        else:
            bad+=1; print("BAD",mod,repr(o2)[:300]); continue
    for n,v in ((old,o2),(new,w2)):
        a=starts[n.lineno-1]+n.col_offset; b=starts[n.end_lineno-1]+n.end_col_offset
        edits.append((a,b,repr(v).encode()))
for a,b,v in sorted(edits,reverse=True): raw=raw[:a]+v+raw[b:]
p.write_bytes(raw); print(len(edits)//2,"mended",bad,"bad")
