import sys
sys.argv=[""]
exec(open("/tmp/rev12/sim.py").read().split("cases = {")[0])
from collections import Counter
cases = {
 "one device, b.e. 2k/128, half": (64, (0.5,256,256,2000,128), {}),
 "one device, b.e. 16k/32, 20%": (64, (0.2,256,256,16000,32), {}),
 "two devices, b.e. 8k/64, half": (64, (0.5,256,256,8000,64), {"devices":2}),
 "two devices, b.e. 2k/128, half": (64, (0.5,256,256,2000,128), {"devices":2}),
}
for name,(n,a,more) in cases.items():
  for seed in (1,2,3):
    row=[]
    for mode, mv in (("verify",False),("direct",False),("auto",False),("auto",True)):
        c = Cluster(mode=mode, movable=mv, seed=seed, **more); s = src(*a, seed=seed)
        c.run(40.0, s, n); k=len(c.ended); plans=Counter(); 
        before=c.tokens; t0=c.now
        for end in range(42, 122, 2):
            c.run(float(end), s, n); plans[(c.plan, c.moves)]+=1
        t=(c.tokens-before)/(c.now-t0)
        e=c.ended[k:]
        row.append(f"{mode}{'+moved' if mv else ''} {t:.0f} {dict(plans) if mode=='auto' else ''}")
    print(name, seed, "|", "; ".join(row), flush=True)
