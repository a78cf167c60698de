import ast,json,re,sys,importlib
from collections import defaultdict
from pathlib import Path
ROOT=Path(sys.argv[1]); sys.path[:0]=[str(ROOT),str(ROOT/"tests/kits"),str(ROOT/"benchmarks")]
news=defaultdict(set)
for t in sys.argv[2:]:
    for l in Path(t).read_text().splitlines():
        if l.strip():
            e=json.loads(l); news[e["name"].split(".")[-1]].add(e["new"])
files=[*(ROOT/"tests").rglob("*.py"),*(ROOT/"benchmarks").rglob("*.py")]
for p in files:
    src=p.read_text()
    if "setattr(" not in src and "getattr(" not in src: continue
    tree=ast.parse(src); env={}
    for n in ast.walk(tree):
        if isinstance(n,ast.Import):
            for a in n.names: env[a.asname or a.name.split(".")[0]]=(a.name if a.asname else a.name.split(".")[0],None)
        elif isinstance(n,ast.ImportFrom) and n.module and n.level==0:
            for a in n.names: env[a.asname or a.name]=(n.module,a.name)
    lines=src.split("\n"); edits=[]
    for n in ast.walk(tree):
        if not(isinstance(n,ast.Call) and isinstance(n.func,(ast.Attribute,ast.Name))): continue
        fn=n.func.attr if isinstance(n.func,ast.Attribute) else n.func.id
        if fn not in("setattr","delattr","getattr","hasattr","object"): continue
        if not n.args: continue
        if isinstance(n.args[0],ast.Constant) and isinstance(n.args[0].value,str) and n.args[0].value.startswith("polarnode."):
            mod,_,name=n.args[0].value.rpartition("."); node=n.args[0]
            try:
                try: obj=importlib.import_module(mod)
                except ImportError:
                    m,_,c=mod.rpartition("."); obj=getattr(importlib.import_module(m),c)
            except Exception as ex: print("?",p.name,n.lineno,n.args[0].value,ex); continue
        elif len(n.args)>=2 and isinstance(n.args[1],ast.Constant) and isinstance(n.args[1].value,str):
            name=n.args[1].value; node=n.args[1]; chain=[]; x=n.args[0]
            while isinstance(x,ast.Attribute): chain.append(x.attr); x=x.value
            if not isinstance(x,ast.Name) or x.id not in env: 
                if name in news and isinstance(x,ast.Name): print("LOCAL",p.relative_to(ROOT),n.lineno,ast.unparse(n)[:110],news[name])
                continue
            m,a=env[x.id]
            try:
                obj=importlib.import_module(m)
                if a: 
                    try: obj=getattr(obj,a)
                    except AttributeError: obj=importlib.import_module(m+"."+a)
                for c in reversed(chain): obj=getattr(obj,c)
            except Exception as ex: print("?",p.name,n.lineno,ast.unparse(n)[:80],ex); continue
        else: continue
        if hasattr(obj,name): continue
        ok=[w for w in news.get(name,()) if hasattr(obj,w)]
        if len(ok)==1: edits.append((node,name,ok[0])); print("FIX",p.relative_to(ROOT),n.lineno,name,ok[0])
        elif name in news: print("CHOOSE",p.relative_to(ROOT),n.lineno,ast.unparse(n)[:110],news[name])
    for node,o,w in sorted(edits,key=lambda e:(e[0].lineno,e[0].col_offset),reverse=True):
        r=node.end_lineno-1; l=lines[r].encode(); b=node.end_col_offset; seg=l[:b].decode(); i=seg.rfind(o); lines[r]=seg[:i]+w+seg[i+len(o):]+l[b:].decode()
    if edits: p.write_text("\n".join(lines))
