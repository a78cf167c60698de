"""unprose.py ROOT BRANCH TABLE…: prose words that the resolver renamed, back to the branch's."""
import io,json,re,subprocess,sys,tokenize
from pathlib import Path
ROOT,BR=Path(sys.argv[1]),sys.argv[2]
pairs=set()
for t in sys.argv[3:]:
    for l in Path(t).read_text().splitlines():
        if l.strip():
            e=json.loads(l); o,n=e["name"].split(".")[-1],e["new"]
            if o!=n: pairs.add((o,n))
by={}
for o,n in pairs: by.setdefault(n,[]).append(o)
def prose(src):
    out=[];prev=None
    for t in tokenize.generate_tokens(io.StringIO(src).readline):
        if t.type==tokenize.COMMENT: out.append(t)
        elif t.type==tokenize.STRING and t.string.lstrip("r").startswith('"""') and (prev is None or prev.type in (tokenize.NEWLINE,tokenize.INDENT,tokenize.NL,tokenize.COMMENT,tokenize.ENCODING)): out.append(t)
        prev=t
    return out
norm=lambda s: re.sub(r"\s+"," ",re.sub(r"(?m)^\s*# ?"," ",s)).strip()
files=subprocess.run(["git","diff","--name-only",f"main...{BR}","--","*.py"],cwd=ROOT,capture_output=True,text=True).stdout.split()
total=0
for f in files:
    p=ROOT/f
    if not p.exists(): continue
    base=subprocess.run(["git","show",f"{BR}:{f}"],cwd=ROOT,capture_output=True,text=True).stdout
    whole=norm("\n".join(t.string.strip('"') for t in prose(base)))
    src=p.read_text(); L=src.split("\n"); n=0
    for t in prose(src):
        for r in range(t.start[0]-1,t.end[0]):
            l=L[r]; a=t.start[1] if r==t.start[0]-1 else 0
            head,text=l[:a],l[a:]
            key=norm(text.strip().strip('"').lstrip("#").strip())
            if not key or key in whole: continue
            words=re.findall(r"\w+",text)
            new=text
            for w in words:
                for o in by.get(w,()):
                    cand=re.sub(rf"\b{w}\b",o,new)
                    k=norm(cand.strip().strip('"').lstrip("#").strip())
                    if k in whole: new=cand; break
            if new!=text:
                n+=1; L[r]=head+new; print(f"{f}:{r+1}: {text.strip()[:90]} => {new.strip()[:90]}")
    if n: p.write_text("\n".join(L)); total+=n
print(total)
