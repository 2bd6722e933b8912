exec(open("/tmp/rev12/sim.py").read().split("cases = {")[0])
from llm42.session import policy
from llm42.session.policy import *
c = Cluster(mode="auto", movable=False, seed=1); s = src(0.5,256,256,2000,128, seed=1)
flips=0; last=None; t=0.0
for end in range(1, 61):
    before=c.tokens
    c.run(float(end), s, 64)
    l=c.load()
    typ=c._progress(Job(True, 256, c.typical), None)
    det=[j for j in c.jobs if j.deterministic]
    if end>=30 and end<50:
        cost={w: (round(typ.left*round_s(typ,l,w),3), round(prompts_s(typ,l,w),3)) for w in WAYS}
        print(end, l.plan, "det verify/direct", sum(j.way=="verify" for j in det), sum(j.way=="direct" for j in det), "b.e.", len(c.jobs)-len(det), cost, "fast row %.1e"%l.fast.row_s, "fast.at(32) %.4f at(64) %.4f"%(l.fast.at(32), l.fast.at(64)), "dec(32) %.4f row %.1e"%(l.verifier.decode.at(32), l.verifier.decode.row_s), "tok/s", c.tokens-before)
