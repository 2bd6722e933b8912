exec(open("/tmp/rev12/sim.py").read().split("cases = {")[0])
from llm42.session import policy
import tests.support.simulated_cluster as sc
def go(label, a, n=64, **more):
    c = Cluster(mode="auto", movable=False, seed=1, **more); s = src(*a)
    c.run(40.0, s, n); t=c.tokens; t0=c.now; flips=0; last=c.plan; ch=c.changes
    for end in range(41,121):
        c.run(float(end), s, n); flips+= c.plan!=last; last=c.plan
    print(label, round((c.tokens-t)/(c.now-t0)), "plan changes in 80 s", flips, "requests changed", c.changes-ch, flush=True)
A=(0.5,256,256,2000,128); B=(0.2,256,256,16000,32); C=(0.5,256,256,1000,128)
m0=policy.MARGIN
for mg in (0.02,0.05,0.1,0.2):
    policy.MARGIN=mg; go(f"2k/128 margin {mg}", A)
policy.MARGIN=m0
go("1k/128 margin .02", C)
# exact costs instead of measured
from llm42.step_times import StepTimes
orig=sc.Cluster.load
class Exact(Cluster):
    def load(self):
        st=self.stats.times, self.decode_times, self.window_times
        class T:
            pass
        for obj,costs in zip(st,(self.fast,self.decode,self.windows)):
            obj.__class__=type("X",(StepTimes,),{"costs":property(lambda s,c=costs:c)})
        return super().load()
def go2(label,a,n=64):
    c = Exact(mode="auto", movable=False, seed=1); s = src(*a)
    c.run(40.0, s, n); t=c.tokens; t0=c.now; flips=0; last=c.plan
    for end in range(41,121):
        c.run(float(end), s, n); flips+= c.plan!=last; last=c.plan
    print(label, round((c.tokens-t)/(c.now-t0)), "plan changes", flips, "at the end", c.plan, flush=True)
go2("2k/128 true costs", A); go2("16k/32 20% true costs", B)
go("16k/32 20% measured", B)
