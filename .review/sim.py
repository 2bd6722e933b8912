import sys
from itertools import count
from random import Random
from tests.support.simulated_cluster import Cluster, Job, VLLM, DECODE, WINDOWS
from llm42.step_times import Costs
def src(share, dp, dm, bp, bm, seed=1):
    r, due = Random(seed), 0.0
    while True:
        due += share; det = due >= 1.0; due -= det
        p, m = (dp, dm) if det else (bp, bm)
        yield Job(det, round(p*r.uniform(.5,1.5)), max(1,round(m*r.uniform(.5,1.5))))
def run(mode, at_once, args, warm=20.0, meas=15.0, **more):
    c = Cluster(mode=mode, **more); s = src(*args)
    c.run(warm, s, at_once); n=len(c.ended); t=c.run(warm+meas, s, at_once)
    e=c.ended[n:]
    det=sum(j.output for j in e if j.deterministic)/meas; be=sum(j.output for j in e if not j.deterministic)/meas
    return t, det, be, max([j.changes for j in c.ended] or [0])
FAST = Costs(((1.0, 0.02), (8.0, 0.03), (64.0, 0.16)), 2e-3)
SLOW = Costs(((1.0, 0.06), (8.0, 0.12), (64.0, 0.3)), 4e-3)
ROWS = Costs(((1.0, 0.06), (8.0, 0.08), (64.0, 0.24)), 4e-3)
CPU = {"fast": FAST, "decode": SLOW, "windows": ROWS}
cases = {
 "long b.e. prompts 8k/64, det 256/256, half": (64, (0.5,256,256,8000,64), {}),
 "long b.e. prompts 16k/32, det 256/256, 20%": (64, (0.2,256,256,16000,32), {}),
 "long b.e. prompts 2k/128": (64, (0.5,256,256,2000,128), {}),
 "short 256/256 half": (64, (0.5,256,256,256,256), {}),
 "short 256/256 10%": (64, (0.1,256,256,256,256), {}),
 "two devices half": (64, (0.5,256,256,256,256), {"devices":2}),
 "two devices 20% at 128": (128, (0.2,256,256,256,256), {"devices":2}),
 "two devices 8k b.e.": (64, (0.5,256,256,8000,64), {"devices":2}),
}
for name,(n,a,more) in cases.items():
    row=[]
    for mode, mv in (("verify",False),("direct",False),("auto",False),("auto",True)):
        t,d,b,ch = run(mode,n,a,movable=mv,**more)
        row.append(f"{mode}{'+moved' if mv else ''}: {t:.0f} (det {d:.0f}, be {b:.0f}, ch {ch})")
    print(name, "|", "; ".join(row), flush=True)
