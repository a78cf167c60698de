"""merge_forks.py SRC_ROLLOUTS DST_FILE: one forks.py of five files."""
import ast,re,sys
R,dst=sys.argv[1].rstrip('/')+'/',sys.argv[2]
order=['fork_nodes','forks','resuming','trees','continuing']
heads={'fork_nodes':'at which node a fork begins','forks':'the parent, and forks by replay','resuming':'forks by resume and by freeze','trees':'forks of a tree','continuing':'the attempt after a lost one'}
cur=open(dst).read()
doc=cur[:cur.index('"""\n',10)+4]
notes={}
for m in order:
    h=f"# ── {heads[m]} ".ljust(78,'─')+'\n'
    after=cur[cur.index(h)+len(h):].lstrip('\n')
    got=[]
    for l in after.split('\n'):
        if l.startswith('# '): got.append(l)
        else: break
    notes[m]='\n'.join(got)+'\n' if got and m in ('fork_nodes','trees','continuing') else ''
imports=[];bodies=[]
for m in order:
    s=open(R+m+'.py').read(); t=ast.parse(s); lines=s.split('\n'); last=0
    for n in t.body:
        if isinstance(n,(ast.Import,ast.ImportFrom)):
            if not (isinstance(n,ast.ImportFrom) and n.module in {f'polarnode.rollouts.{x}' for x in order}):
                imports.append('\n'.join(lines[n.lineno-1:n.end_lineno]))
            last=n.end_lineno
    bodies.append((m,'\n'.join(lines[last:]).strip('\n')))
out=doc+'\n'+'\n'.join(imports)+'\n\n'
tops=[]
for m,b in bodies:
    b=re.sub(r'^T = TypeVar\("T"\)\n+','',b,flags=re.M)
    b=re.sub(r'^logger = logging.getLogger\(__name__\)\n+','',b,flags=re.M)
    tops.append(f"# ── {heads[m]} ".ljust(78,'─')+'\n'+(('\n'+notes[m]) if notes[m] else '')+'\n'+b.strip('\n')+'\n')
out+='logger = logging.getLogger(__name__)\n\nT = TypeVar("T")\n\n'+'\n\n'.join(tops)
open(dst,'w').write(out)
