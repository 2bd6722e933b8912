import sys,time
from random import Random
from tests.support.simulated_cluster import Cluster, Job
def src(share, dp, dm, bp, bm, seed=1):
    r, due = Random(seed), 0.0
    while True:
        due += share; det = due >= 1.0; due -= det
        p, m = (dp, dm) if det else (bp, bm)
        yield Job(det, round(p*r.uniform(.5,1.5)), max(1,round(m*r.uniform(.5,1.5))))
C={
"rag":(64,(0.5,256,256,2000,128),{}),
"16k":(64,(0.2,256,256,16000,32),{}),
"128h":(128,(0.5,256,256,256,256),{}),
"256.2":(256,(0.2,256,256,256,256),{}),
"256.3":(256,(0.3,256,256,256,256),{}),
"mv8k2":(64,(0.5,256,256,8000,64),{"devices":2,"movable":True}),
"mvkv":(128,(0.2,1000,256,1000,256),{"movable":True,"kv_tokens":131072}),
"mv16k":(64,(0.2,256,256,16000,32),{"movable":True}),
"mvrag":(64,(0.5,256,256,2000,128),{"movable":True}),
"64h":(64,(0.5,256,256,256,256),{}),
"8h":(8,(0.5,256,256,256,256),{}),
"64all":(64,(1.0,256,256,256,256),{}),
"mv256":(256,(0.5,256,256,256,256),{"movable":True,"kv_tokens":131072}),
}
for k in (sys.argv[1:] or C):
    n,a,more=C[k]; row=[]
    for mode in ("verify","direct","auto"):
        m={x:y for x,y in more.items() if mode=="auto" or x!="movable"}
        c=Cluster(mode=mode,seed=1,**m); s=src(*a); t0=time.process_time()
        c.run(300.0,s,n); w=c.tokens; f=0;last=c.plan;log=[]
        for e in range(301,361): #
            c.run(float(e),s,n)
            if c.plan!=last: log.append((e,c.plan)); last=c.plan
        row.append(((c.tokens-w)/60))
    print(k,*[round(x) for x in row],"%.3f"%(row[2]/max(row[:2])),"changes",c.standing.changes,log,c.plan,c.moves,"cpu %.1f"%(time.process_time()-t0),flush=True)
