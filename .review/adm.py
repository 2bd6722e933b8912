import asyncio, math
from types import SimpleNamespace
from dataclasses import replace
from llm42.session.policy import *
from llm42.step_times import Costs, VerifierLoad
from llm42_serve.verifiers.load import Limits
from llm42_serve.replica.admission import Admission
# a 70B-like machine: long steps. 16 deterministic, 112 b.e., one device
F=Costs(((1,.05),(16,.10),(64,.20),(128,.30)),2e-4); D=Costs(((1,.05),(16,.11),(64,.22),(128,.32)),3e-4); W=Costs(((1,.05),(64,.15),(256,.3),(1024,1.0)),3e-4)
v=VerifierLoad(D,W,16,0,1024,400_000,380_000)
l=Load(112,112,False,64,F,v,True,"direct"); typ=Progress(None,300,0,300,typical=300)
print("moves", moves(typ,l), "with 64 deterministic of 176")
lim=Limits(0.9,0.25,0.5)
st=lambda direct,kv,step: SimpleNamespace(direct=direct,places=256,kv_used=kv,kv_tokens=400_000,step_s=step)
print("deterministic alone: excess", lim.excess(st(60,60*500,.215)), "| with moved b.e.", lim.excess(st(60+112,172*500,.42)))
l2=replace(l,moves=True,verifier=replace(v,direct=172,places=256,kv_free=300_000))
print("does a moved one go back?", choose_best_effort(Progress("direct",400,100,300),l2), "a new one", choose_best_effort(Progress(None,300,0,300),replace(l2,verifier=replace(l2.verifier,direct=120))))
async def main():
    a=Admission(128,100,0.5,0.5)
    async with a.place(True), a.place(True):
        print("deterministic limit", a.limit)
        a.observe(math.inf)      # Following._hear: a moved best-effort request was refused (Overloaded)
        print("after a moved best-effort request was refused", a.limit)
    b=Admission(128,100,0.5,0.5)
    async with b.place(True), b.place(True):
        b.look(True); print("after a crowded look", b.limit)
asyncio.run(main())
