from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from llm42.config import Settings, SessionSettings
from llm42.protocol import Request
from llm42.session.machine import Session
from llm42.session.ways import Ways
from llm42.session.policy import *
from llm42.step_times import Costs, VerifierLoad
from tests.support.simulated_cluster import VLLM, DECODE, WINDOWS
s = Settings()
v = VerifierLoad(DECODE, WINDOWS, 10, 0, 256, 10**7, 10**7, 0.0)
client: Any = SimpleNamespace(load=lambda _: v)
engine: Any = SimpleNamespace(times=SimpleNamespace(costs=VLLM))
ws=[]
import llm42.config
tot=0
with ExitStack() as st:
    for rep in range(2):
        w = Ways(s, engine); w._places=256; w._one_device=True; ws.append(w)
        for i in range(10): st.enter_context(w.counted(Request(f"d{rep}-{i}",(1,)*100,256,deterministic=True),True))
        rs=[Request(f"b{rep}-{i}",(1,)*100,256,seeded=False) for i in range(200)]
        for r in rs: st.enter_context(w.counted(r,False))
        w._moves=True; w._plan="direct"; w._planned_at=1e18
        import time
        got=[w.next_best_effort(r,0,None,0,client) for r in rs]
        tot+=got.count("direct"); print("moved at once, replica", rep, got.count("direct"), "limit", COMES*v.places)
print("in all", tot, "of", v.places, "places")
# kv: several replicas
v2 = VerifierLoad(DECODE, WINDOWS, 10, 0, 1024, 131072, 131072, 0.0)
client2: Any = SimpleNamespace(load=lambda _: v2)
tot=0
with ExitStack() as st:
    for rep in range(4):
        w = Ways(s, engine); w._places=256; w._one_device=True
        rs=[Request(f"x{rep}-{i}",(1,)*1500,512,deterministic=True) for i in range(100)]
        for r in rs: st.enter_context(w.counted(r,True))
        w._plan="direct"; w._planned_at=1e18
        got=[w.first(Session(r,s.session,0.0),client2) for r in rs]
        tot+=got.count("direct")*(1500+128)
    print("KV asked of one verifier by 4 replicas at once", tot, "of", v2.kv_tokens)
