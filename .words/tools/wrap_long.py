"""wrap_long.py ROOT: mends ruff's E501 in docstrings, comments and lone string lines."""
import json,re,subprocess,sys
from collections import defaultdict
from pathlib import Path
ROOT=Path(sys.argv[1]); W=110
out=subprocess.run([".venv/bin/ruff","check","--select","E501","--output-format","json","."],cwd=ROOT,capture_output=True,text=True).stdout
by=defaultdict(list)
for d in json.loads(out): by[d["filename"]].append(d["location"]["row"]-1)
left=[]
def wrap(text,indent,prefix=""):
    lines=[];cur=indent+prefix
    first=True
    for w in text.split(" "):
        if len(cur)+1+len(w)>W and cur.strip():
            lines.append(cur.rstrip()); cur=indent+prefix+w
        else:
            cur = cur+w if first or cur==indent+prefix else cur+" "+w
        first=False
    lines.append(cur.rstrip()); return lines
for f,rows in by.items():
    p=Path(f); L=p.read_text().split("\n")
    for r in sorted(rows,reverse=True):
        l=L[r]; ind=l[:len(l)-len(l.lstrip())]; s=l.strip()
        if s.startswith('"""') and s.endswith('"""') and len(s)>6:
            got=wrap(s[:-3],ind)
            if len(got)==1:
                head,_,tail=got[0].rpartition(" "); got=[head,ind+tail]
            L[r:r+1]=got+[ind+'"""']
        elif s.startswith("# "):
            L[r:r+1]=wrap(s[2:],ind,"# ")
        elif re.match(r'^(f|r|rb|b)?"[^"]*"[,)]?$',s) and s.count('"')==2:
            q=s.index('"'); pre=s[:q+1]; end=s[s.rindex('"'):]
            body=s[q+1:s.rindex('"')]
            cut=body.rfind(" ",0,W-len(ind)-len(pre)-2)
            if cut<=0 or "{" in body[cut:] and body[:cut].count("{")!=body[:cut].count("}"): left.append((f,r+1)); continue
            L[r:r+1]=[ind+pre+body[:cut]+'"',ind+(pre if "{" in body[cut:] or pre!='f"' else '"')+body[cut:]+end]
        elif re.search(r'"[^"]*"',s)is None and '  # ' in l:
            code,c=l.split("  # ",1)
            L[r:r+1]=wrap(c,ind,"# ")+[code.rstrip()]
        elif '  # ' in l and l.rindex("  # ")>0 and l[:l.rindex("  # ")].count('"')%2==0:
            i=l.rindex("  # "); code,c=l[:i],l[i+4:]
            L[r:r+1]=wrap(c,ind,"# ")+[code.rstrip()]
        elif not re.search(r'[(){}\[\]="\']',s) or True:
            # a line of a docstring: push its last word(s) to the next line if that has room in the same paragraph
            nxt=L[r+1] if r+1<len(L) else ""
            cut=l.rfind(" ",0,W)
            tail=l[cut+1:]
            if cut>len(ind) and '"""' not in l and nxt.strip() and nxt.startswith(ind) and not nxt.strip().startswith('"""') and re.search(r'[a-z]',s) and not re.search(r'^(return|raise|if|for|while|with|assert|def|class|await|[\w.]+ ?[=(])',s):
                L[r]=l[:cut]; L[r+1]=ind+tail+" "+nxt.strip()
            elif cut>len(ind) and '"""' not in l and not re.search(r'[=({\[]',s):
                L[r]=l[:cut]; L.insert(r+1,ind+tail)
            else: left.append((f,r+1))
    p.write_text("\n".join(L))
for f,r in left: print(f"{f}:{r}")
