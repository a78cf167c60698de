import io,json,re,sys,tokenize
from pathlib import Path
ROOT=Path(sys.argv[1]); m=json.load(open("@T@/words/fast_map.json"))
black="WEIGHTS COMMIT NONE apply_patch local_shell additional_tools agent_message too_slow tool_call OPTIONS CONNECT LEVEL of_nobody read_again CLOSED _adapter".split()
rev={m[b]:b for b in black if b in m}
for t in ("polarnode","tests","benchmarks","tools","examples"):
    for p in (ROOT/t).rglob("*.py"):
        src=p.read_text()
        if not any(k in src for k in rev): continue
        lines=src.split("\n"); hits=[]
        for tok in tokenize.generate_tokens(io.StringIO(src).readline):
            if tok.type==tokenize.STRING and tok.start[0]==tok.end[0] and not tok.string.startswith(("f","F")):
                for w in rev:
                    if re.search(rf"\b{w}\b",tok.string): hits.append((tok.start[0]-1,tok.start[1],tok.end[1],w))
        for r,a,b,w in sorted(hits,reverse=True):
            l=lines[r]; lines[r]=l[:a]+re.sub(rf"\b{w}\b",rev[w],l[a:b])+l[b:]
        if hits: p.write_text("\n".join(lines)); print(p.name,len(hits))
