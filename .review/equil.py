exec(open("/tmp/rev12/sim.py").read().split("cases = {")[0])
from llm42.session import policy
from llm42.session.policy import *
import sys
CUR=[None]
old=policy.round_s
def q():
    c=CUR[0]; e=c.ended[-400:]
    d=sum(j.output for j in e if j.deterministic); b=sum(j.output for j in e if not j.deterministic)
    return d/b if d and b else None
def round_s(request, load, way):
    if way=="verify" or load.moves or not load.best_effort or not load.one_device: return old(request,load,way)
    r=q()
    if r is None: return old(request,load,way)
    v=load.verifier; n=load.best_effort+load.deterministic; lo,hi=0.01,n-0.01
    for _ in range(30):
        d=(lo+hi)/2; rate=(d/v.decode.at(v.others+d*v.share))/((n-d)/load.fast.at(n-d))
        lo,hi=(d,hi) if rate<r else (lo,d)
    fast,dec=(n-d)/(2*load.fast.at(n-d)), d/(2*v.decode.at(v.others+d*v.share))
    return n/(fast+dec)
policy.round_s=round_s
def go(label,a,n,sec=60,**more):
    row=[]
    for mode in ("verify","direct","auto"):
        c=Cluster(mode=mode,movable=False,seed=1,**more); CUR[0]=c; s=src(*a); c.run(30.0,s,n); t,t0=c.tokens,c.now; f=0; last=c.plan
        for e in range(31,31+sec):
            c.run(float(e),s,n); f+=c.plan!=last; last=c.plan
        row.append(f"{mode} {(c.tokens-t)/(c.now-t0):.0f}"+(f" (plan changes {f}, {c.plan})" if mode=="auto" else ""))
    print(label,"; ".join(row),flush=True)
for n in (64,128,256):
    for sh in (0.1,0.2,0.3,0.5): go(f"{n} {sh}",(sh,256,256,256,256),n,40)
go("2k/128 half 64",(0.5,256,256,2000,128),64)
go("16k/32 20% 64",(0.2,256,256,16000,32),64)
