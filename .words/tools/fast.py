"""fast.py ROOT TABLE…: rename by tokens what can be only one thing; write the rest of each table to TABLE.rest."""
import ast,io,json,re,sys,tokenize
from collections import defaultdict
from pathlib import Path
ROOT=Path(sys.argv[1]); tables=[Path(t) for t in sys.argv[2:]]
tops=("polarnode","tests","benchmarks","tools","examples","runtimes")
files=[p for t in tops for p in (ROOT/t).rglob("*.py") if ".venv" not in p.parts]
text={p:p.read_text() for p in files}
defs=defaultdict(set)  # name -> {(relpath, kind)}
lib=set()
names_in={}
for p in files:
    rel=str(p.relative_to(ROOT)); t=ast.parse(text[p]); seen=set()
    def visit(node,qual):
        for c in ast.iter_child_nodes(node):
            q=qual
            if isinstance(c,(ast.FunctionDef,ast.AsyncFunctionDef,ast.ClassDef)):
                defs[c.name].add((rel,".".join([*qual,c.name]))); q=[*qual,c.name]
            elif isinstance(c,ast.Name):
                seen.add(c.id)
                if isinstance(c.ctx,(ast.Store,ast.Del)): defs[c.id].add((rel,".".join([*qual,c.id])))
            elif isinstance(c,ast.Attribute):
                seen.add(c.attr)
                if isinstance(c.ctx,ast.Store):
                    defs[c.attr].add((rel,"@"+c.attr))
            elif isinstance(c,ast.arg): defs[c.arg].add((rel,".".join([*qual,"("+c.arg])))
            elif isinstance(c,ast.alias):
                if c.asname: defs[c.asname].add((rel,"as"))
                seen.add(c.name)
            elif isinstance(c,ast.ImportFrom) or isinstance(c,ast.Import): pass
            elif isinstance(c,ast.ExceptHandler) and c.name: defs[c.name].add((rel,"except"))
            elif isinstance(c,(ast.MatchAs,ast.MatchStar)) and c.name: defs[c.name].add((rel,"match"))
            elif isinstance(c,ast.keyword) and c.arg: seen.add("="+c.arg)
            visit(c,q)
    visit(t,[])
    for n in ast.walk(t):
        if isinstance(n,ast.ImportFrom) and not ((n.module or "").startswith("polarnode") or n.level or (ROOT/"tests/kits"/((n.module or "x").split(".")[0]+".py")).exists() or (ROOT/"benchmarks"/((n.module or "x").split(".")[0]+".py")).exists()):
            lib|={a.name for a in n.names}
    names_in[p]=seen
entries=defaultdict(list)
for T in tables:
    for l in T.read_text().splitlines():
        if l.strip():
            e=json.loads(l)
            if e["name"].split(".")[-1]!=e["new"]: entries[e["name"].split(".")[-1]].append((T,e))
LIB=set(json.load(open('@T@/words/lib_names.json')))
mapping={}
allnew=defaultdict(set)
for old,es in entries.items():
    news={e["new"] for _,e in es}
    if len(news)!=1 or old in lib or old.startswith("__"): continue
    private=old.startswith("_"); caps=old.isupper() and len(old)>3
    words="_" in old.strip("_") and len(old)>=8
    if not(private or caps or words) and old in LIB: continue
    if not (private or caps) and old in LIB: continue
    (new,)=news
    listed={(e["path"],e["name"]) for _,e in es}
    listed_paths_at={(e["path"],"@"+old) for _,e in es}
    real=defs.get(old,set())
    if not real: continue
    if any(d not in listed and d not in listed_paths_at for d in real): continue
    if new in defs or new in lib: continue  # its name is somebody's already: the slow way
    if any("="+old in s for s in names_in.values()): continue
    mapping[old]=new
# two olds to one new: allowed only if never in one file
inv=defaultdict(list)
for o,n in mapping.items(): inv[n].append(o)
for n,os in inv.items():
    if len(os)>1:
        for o in os: mapping.pop(o)
changed=0
for p in files:
    if not any(o in text[p] for o in mapping): continue
    src=text[p]; lines=src.split("\n"); hits=[]
    for tok in tokenize.generate_tokens(io.StringIO(src).readline):
        if tok.type==tokenize.NAME and tok.string in mapping: hits.append((tok.start,tok.string))
        elif tok.type==tokenize.STRING and "f" in tok.string[:3].split('"')[0].split("'")[0].lower():
            full=tok.string; base_r,base_c=tok.start
            for b in re.finditer(r"\{[^{}]*\}",full):
                for m in re.finditer(r"\b[A-Za-z_]\w*\b",b.group()):
                    if m.group() in mapping:
                        at=b.start()+m.start(); before=full[:at]
                        r=base_r+before.count("\n"); c=(base_c+at) if "\n" not in before else at-before.rindex("\n")-1
                        hits.append(((r,c),m.group()))
    for (r,c),o in sorted(hits,reverse=True):
        l=lines[r-1]; assert l[c:c+len(o)]==o
        lines[r-1]=l[:c]+mapping[o]+l[c+len(o):]; changed+=1
    # quoted annotations and f-strings
    new="\n".join(lines)
    p.write_text(new)
for T in tables:
    rest=[l for l in T.read_text().splitlines() if l.strip() and json.loads(l)["name"].split(".")[-1] not in mapping]
    # qualified names of what is left
    out=[]
    for l in rest:
        e=json.loads(l); parts=e["name"].split("."); parts=[mapping.get(x,x) for x in parts[:-1]]+[parts[-1]]; e["name"]=".".join(parts); out.append(json.dumps(e))
    Path(str(T)+".rest").write_text("\n".join(out)+"\n")
    print(T.name,len(rest),"left")
print(len(mapping),"names,",changed,"places")
json.dump(mapping,open("@T@/words/fast_map2.json","w"))
