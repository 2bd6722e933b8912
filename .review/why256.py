exec(open("/tmp/rev12/sim.py").read().split("cases = {")[0])
from llm42.session.policy import *
for mode in ("verify","direct","auto"):
  for sh,n in ((0.2,256),(0.5,128)):
    c=Cluster(mode=mode,seed=1); s=src(sh,256,256,256,256); c.run(35.0,s,n)
    l=c.load(); typ=c._progress(Job(True,256,c.typical),None); t=c.tokens; c.run(45.0,s,n)
    d=sum(j.deterministic for j in c.jobs); 
    print(mode,sh,n,"measured tok/s",(c.tokens-t)/10,"d",d,"b",len(c.jobs)-d,"plan",l.plan,{w:(round(n/round_s(typ,l,w)),"round",round(typ.left*round_s(typ,l,w),2),"prompts",round(prompts_s(typ,l,w),2)) for w in WAYS}, "typ",typ.length,typ.most, "fast", [(round(a),round(b*1e3,1)) for a,b in l.fast.times[-3:]], l.fast.row_s, "dec",[(round(a),round(b*1e3,1)) for a,b in l.verifier.decode_steps.times[-3:]],"win",[(round(a),round(b*1e3,1)) for a,b in l.verifier.window_steps.times[-3:]],flush=True)
