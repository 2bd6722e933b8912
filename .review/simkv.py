exec(open("/tmp/rev12/sim.py").read().split("cases = {")[0])
import tests.support.simulated_cluster as sc
from llm42.step_times import VerifierLoad as VL
from collections import Counter
KV=131072
cur=[None]
def VLkv(d,w,direct,others,places,kvt,kvf,waited):
    c=cur[0]; used=sum(j.prompt+j.output for j in c.jobs if j.way=="direct")
    return VL(d,w,direct,others,1024,KV,max(0,KV-used),waited)
sc.VerifierLoad=VLkv
for name,(n,a) in {"1k/256 half 128":(128,(0.5,1000,256,1000,256)),"1k/256 20% 128":(128,(0.2,1000,256,1000,256)),"256/256 20% 256":(256,(0.2,256,256,256,256)),"256/256 half 256":(256,(0.5,256,256,256,256))}.items():
    row=[]
    for mode, mv in (("verify",False),("direct",False),("auto",False),("auto",True)):
        c = Cluster(mode=mode, movable=mv, seed=1); cur[0]=c; s = src(*a)
        c.run(40.0, s, n); t=c.tokens; t0=c.now; mov=[]
        for end in range(42,82,2):
            c.run(float(end), s, n); mov.append((c.plan,c.moves,sum(j.way=="direct" and not j.deterministic for j in c.jobs),sum(not j.deterministic for j in c.jobs)))
        row.append(f"{mode}{'+moved' if mv else ''} {(c.tokens-t)/(c.now-t0):.0f} {mov[-3:] if mv else ''}")
    print(name,"|","; ".join(row),flush=True)
