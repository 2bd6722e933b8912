"""A plan that stands (Held), and moves with prompts and with room counted, at real limits (KV 131072, 1024 places)."""
exec(open("/tmp/rev12/sim.py").read().split("cases = {")[0])
from dataclasses import replace
from llm42.session import policy
import tests.support.simulated_cluster as sc
from llm42.step_times import VerifierLoad as VL
KV=131072; CUR=[None]
def VLkv(d,w,direct,others,places,kvt,kvf,waited):
    used=sum(j.prompt+j.output for j in CUR[0].jobs if j.way=="direct")
    return VL(d,w,direct,others,1024,KV,max(0,KV-used),waited)
sc.VerifierLoad=VLkv
old=policy.moves
def moves(typical, load):
    """Only where there is room for all that would go."""
    v=load.verifier
    if v is not None and load.deterministic:
        c=CUR[0]; be=[j for j in c.jobs if not j.deterministic]; det=[j for j in c.jobs if j.deterministic]
        need=sum(j.prompt+max(j.output,min(j.most,128)) for j in be)+sum(j.prompt+max(j.output,min(j.most,128)) for j in det)
        if need > (0.7 if load.moves else 0.5)*v.kv_tokens: return False
    return old(typical, load)
def go(label,n,a,mend):
    sc.moves=moves if mend else old
    c=Cluster(mode="auto",movable=True,seed=1); CUR[0]=c; s=src(*a); c.run(40.0,s,n); t,t0=c.tokens,c.now; c.run(80.0,s,n)
    print(label,"mended" if mend else "as it is",round((c.tokens-t)/(c.now-t0)),c.plan,c.moves,flush=True)
for label,n,a in (("1k/256 20% 128",128,(0.2,1000,256,1000,256)),("256/256 20% 128",128,(0.2,256,256,256,256)),("256/256 half 256",256,(0.5,256,256,256,256))):
    for m in (False,True): go(label,n,a,m)
