"""strings.py ROOT MAP.json: old names in quoted annotations, __all__ and monkeypatch strings."""
import io,json,re,sys,tokenize
from pathlib import Path
ROOT=Path(sys.argv[1]); mapping=json.load(open(sys.argv[2]))
for t in ("polarnode","tests","benchmarks","tools","examples"):
    for p in (ROOT/t).rglob("*.py"):
        src=p.read_text()
        lines=src.split("\n"); hits=[]
        for tok in tokenize.generate_tokens(io.StringIO(src).readline):
            if tok.type!=tokenize.STRING or tok.start[0]!=tok.end[0]: continue
            m=re.match(r"^([rRbBuU]*)(['\"])(.*)\2$",tok.string)
            if not m or m.group(1): continue
            body=m.group(3)
            if not re.match(r"^[A-Za-z_][\w.\[\], |]*$",body): continue
            words=re.findall(r"[A-Za-z_]\w*",body)
            line=lines[tok.start[0]-1]
            for w in words:
                if w in mapping and ((w[0].isupper() and not w.isupper()) or "setattr" in line):
                    hits.append((tok.start[0]-1,tok.start[1],tok.end[1],w))
        if hits:
            for r,a,b,w in sorted(hits,reverse=True):
                l=lines[r]; new=l[:a]+re.sub(rf"\b{w}\b",mapping[w],l[a:b])+l[b:]
                print(f"{p.relative_to(ROOT)}:{r+1}: {w} -> {mapping[w]}: {l.strip()[:90]}")
                lines[r]=new
            p.write_text("\n".join(lines))
