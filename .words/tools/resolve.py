"""resolve.py ROOT TABLE…: conflicts of comments (theirs) with renames (ours): theirs, with ours' names."""
import json,re,subprocess,sys
from pathlib import Path
ROOT=Path(sys.argv[1]); ren=[]
for t in sys.argv[2:]:
    for l in Path(t).read_text().splitlines():
        if l.strip():
            e=json.loads(l); ren.append((e["name"].split(".")[-1],e["new"]))
ren=list(dict.fromkeys(ren))
out=subprocess.run(["git","diff","--name-only","--diff-filter=U"],cwd=ROOT,capture_output=True,text=True).stdout.split()
for f in out:
    p=ROOT/f
    if not p.exists(): print("gone",f); continue
    s=p.read_text()
    def one(m):
        ours,theirs=m.group(1),m.group(2)
        ow=set(re.findall(r"\w+",ours))
        for old,new in ren:
            if new in ow and old not in ow and re.search(rf"\b{old}\b",theirs):
                theirs=re.sub(rf"\b{old}\b",new,theirs)
        return theirs
    s=re.sub(r"<<<<<<< [^\n]*\n(.*?)=======\n(.*?)>>>>>>> [^\n]*\n",one,s,flags=re.S)
    p.write_text(s); print("resolved",f)
