import re,os
p='polarnode/rollouts/scheduler.py'; s=open(p).read()
mark='# ── what earlier runs of the node held ────────────────────────────────────────\n\n'
a=s.index(mark)
body=s[a+len(mark):]
sched=s[:a].rstrip('\n')+'\n'
sched=sched.replace('''
`recover` settles what earlier runs of this node held. Each place is settled by one call of the log, so a node
that is killed meanwhile finds the rest at its next start.
''','')
imps=s[s.index('import logging'):s.index('logger = logging')]
doc='''"""Recovery: a node that starts settles the places that its earlier runs held.

Each session of an earlier run is published as a trajectory of the turns that its journal has, and another
attempt begins if retries are left. Each place is settled by one call of the log, so a node that is killed
meanwhile finds the rest at its next start.
"""
'''
open('polarnode/rollouts/recovery.py','w').write(doc+'\n'+imps+'from polarnode.rollouts.scheduler import Scheduler\n\n'+body)
open(p,'w').write(sched)
for top in ('polarnode','tests','benchmarks'):
    for d,_,fs in os.walk(top):
        for f in fs:
            q=os.path.join(d,f)
            if not f.endswith('.py') or q==p: continue
            t=open(q).read()
            def sub(m):
                names=[n.strip() for n in m.group(1).split(',')]
                mine=[n for n in names if n in('recover','_trajectory')]
                rest=[n for n in names if n not in mine]
                out=[]
                if mine: out.append(f"from polarnode.rollouts.recovery import {', '.join(mine)}")
                if rest: out.append(f"from polarnode.rollouts.scheduler import {', '.join(rest)}")
                return '\n'.join(out)
            n=re.sub(r'from polarnode\.rollouts\.scheduler import ([\w, ]+)',sub,t)
            if n!=t: open(q,'w').write(n)
