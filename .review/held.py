exec(open("/tmp/rev12/sim.py").read().split("cases = {")[0])
class Held(Cluster):
    """A plan stands for BASE seconds, twice as long after each change; half as long again after a rest."""
    BASE=5.0
    hold=5.0; until=0.0; _p=None; flips=0
    def load(self):
        before=self.plan
        l=super().load()
        if before is not None and l.plan is not None and l.plan!=before:
            if self.now<self.until:
                self.plan=before; return replace(l,plan=before)
            self.hold=min(160.0, 2*self.hold); self.until=self.now+self.hold; self.flips+=1
        return l
from dataclasses import replace
def go(cls,label,a,n,sec=200):
    c=cls(mode="auto",movable=False,seed=1); s=src(*a); c.run(30.0,s,n); t,t0=c.tokens,c.now; f=0; last=c.plan
    for e in range(31,31+sec):
        c.run(float(e),s,n); f+=c.plan!=last; last=c.plan
    print(label,cls.__name__,round((c.tokens-t)/(c.now-t0)),"plan changes",f,"at the end",c.plan,flush=True)
for label,a,n in (("2k/128 half 64",(0.5,256,256,2000,128),64),("256/256 20% 256",(0.2,256,256,256,256),256),("256/256 30% 256",(0.3,256,256,256,256),256)):
    for cls in (Cluster,Held): go(cls,label,a,n,120)
