exec(open("/tmp/rev12/sim.py").read().split("cases = {")[0])
from collections import Counter
for n in (128,256):
  for sh in (0.1,0.2,0.3,0.5):
    a=(sh,256,256,256,256); row=[]
    for mode,mv in (("verify",False),("direct",False),("auto",False),("auto",True)):
        c = Cluster(mode=mode, movable=mv, seed=1); s = src(*a)
        c.run(30.0, s, n); t=c.tokens; t0=c.now; flips=0; last=c.plan; pl=Counter(); ch=c.changes
        for end in range(31,71):
            c.run(float(end), s, n); flips+= c.plan!=last; last=c.plan; pl[c.plan,c.moves]+=1
        row.append(f"{mode}{'+moved' if mv else ''} {(c.tokens-t)/(c.now-t0):.0f} {(flips, dict(pl), c.changes-ch) if mode=='auto' else ''}")
    print(n, sh, "|", "; ".join(row), flush=True)
