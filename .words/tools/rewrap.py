"""The first line of a multi-line docstring that is too long: rewrap its first paragraph."""
import json,subprocess,textwrap
from collections import defaultdict
from pathlib import Path
out=subprocess.run([".venv/bin/ruff","check","--select","E501","--output-format","json","."],capture_output=True,text=True).stdout
by=defaultdict(list)
for d in json.loads(out): by[d["filename"]].append(d["location"]["row"]-1)
for f,rows in by.items():
    p=Path(f); L=p.read_text().split("\n")
    for r in sorted(rows,reverse=True):
        s=L[r].strip(); ind=L[r][:len(L[r])-len(L[r].lstrip())]
        if s.startswith('"""') and not s[3:].endswith('"""'):
            e=r
            while e+1<len(L) and L[e+1].strip() and L[e+1].strip()!='"""' and not L[e].rstrip().endswith('"""'): e+=1
            if L[e].rstrip().endswith('"""') and e>r:
                para=" ".join(x.strip() for x in L[r:e+1]); para=para[:-3].rstrip(); tail=[ind+'"""']
            else: para=" ".join(x.strip() for x in L[r:e+1]); tail=[]
            L[r:e+1]=textwrap.wrap(para,110,initial_indent=ind,subsequent_indent=ind,break_long_words=False,break_on_hyphens=False)+tail
        elif "  # " in L[r]:
            i=L[r].rindex("  # "); L[r:r+1]=textwrap.wrap(L[r][i+4:],108-len(ind),initial_indent=ind+"# ",subsequent_indent=ind+"# ")+[L[r][:i].rstrip()]
        elif s.startswith('"""'):
            L[r:r+1]=textwrap.wrap(s[:-3],106,initial_indent=ind,subsequent_indent=ind)+[ind+'"""']
        else: print(f,r+1,s[:120])
    p.write_text("\n".join(L))
