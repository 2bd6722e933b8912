import math, time
from dataclasses import replace
from types import SimpleNamespace
from contextlib import ExitStack
from llm42.session import policy
from llm42.session.policy import *
from llm42.step_times import Costs, VerifierLoad
from tests.support.simulated_cluster import VLLM, DECODE, WINDOWS

v = VerifierLoad(DECODE, WINDOWS, 20, 0, 1024, 400_000, 400_000, 0.0)
# 1 division by zero: the last deterministic request ends within PLAN_S
load = Load(20, 20, True, 0, VLLM, v, True, "direct")
for way in ("verify", "direct", None):
    try:
        print("b.e., none deterministic left", way, choose_best_effort(Progress("verify" if way=="verify" else way, 500, 64, 256), load))
    except Exception as e: print("b.e. none deterministic", way, type(e).__name__, e)
# 2 prompt of a b.e. request that begins
load = Load(40, 40, True, 40, VLLM, v, True, "direct")
for n in (256, 8000, 32000, 100000):
    p = Progress(None, n, 0, 256)
    print("begins with prompt", n, choose_best_effort(p, load), "verifier's prompt s", n*v.prompt_row_s)
# 3 many decide at once
# 4 patience of those whose verifier has died
for count, length in ((32, 2000), (64, 4000), (128, 8000)):
    vv = replace(v, direct=count)
    l = Load(0,0,False,count,VLLM,vv,True,"direct")
    p = Progress("direct", length, 100, 500)
    print("after a death", count, length, "needs", count*length*v.prompt_row_s, "patience begun", patience_s(p,l,0.5,True), "not begun", patience_s(p,l,0.5,False))
