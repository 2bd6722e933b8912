"""Run: python -m pytest /tmp/rev12/lab_tests.py -s (rootdir worktree)."""
import asyncio, time
from dataclasses import replace
import pytest
from llm42.session.policy import Load, Progress, choose_best_effort
from llm42.step_times import Costs, VerifierLoad
from llm42.telemetry import metrics as m
from llm42.errors import VerifierUnavailable
from llm42.protocol import Commit
from tests.support import *
from tests.protocol.switching import Counts, Starves, nothing_left
from tests.protocol.test_moved_best_effort import best_effort

FAST = Costs(((1.0, 0.1),), 1e-3); GOOD = Costs(((1.0, 0.01),), 1e-5)

def test_each_new_one_waits(lab):
    """A verifier that hangs: every best-effort request that begins waits two seconds for it."""
    lab = replace(lab, mode="auto", decide_best_effort=choose_best_effort, parts=lab.parts)
    generator = lab.generator(lab.engine(), Starves(lab.verifier().start()))
    v = VerifierLoad(GOOD, GOOD, 1, 0, 128, 10**6, 10**6)
    generator.ways.load = lambda *_: Load(1, 1, True, 1, FAST, v, True, "direct")
    async def first(r):
        t=time.monotonic(); 
        gen=generator.generate(r)
        async for d in gen:
            if d.token_ids: break
        await gen.aclose()
        return time.monotonic()-t
    waited=[asyncio.run(first(replace(r, request_id=f"q{i}"))) for i, r in enumerate(best_effort(4))]
    generator.ways.load = lambda *_: Load(1, 1, False, 1, FAST, v, True, "direct")
    on_engine=[asyncio.run(first(replace(r, request_id=f"p{i}"))) for i, r in enumerate(best_effort(4))]
    print("first token, s:", [round(x,2) for x in waited], "on the engine", [round(x,2) for x in on_engine])

class Dies(Wrapped):
    """Ends with an error after the third commit of each request; the next try's prompt takes as long as all prompts do."""
    takes_s = 1.0
    def __init__(self, verifier): 
        super().__init__(verifier); self.tries={}; self.stopped=[]
    def renew(self, *a): self.verifier.renew(*a)
    def progressed_s(self, _): return 0.0
    def stop(self, name): self.stopped.append(name); self.verifier.stop(name)
    def follow(self, window, sink):
        n=self.tries[window.request_id]=self.tries.get(window.request_id,0)+1
        if n==1:
            said=0
            def heard(a):
                nonlocal said
                said+=1
                if said<=3: sink(a)
                if said==3: sink(VerifierUnavailable("it has died"))
            self.verifier.follow(window, heard)
        else:
            asyncio.get_running_loop().call_later(self.takes_s, self.verifier.follow, window, sink)

@pytest.mark.parametrize("mended", [False, True])
def test_failover(lab, mended, monkeypatch):
    if mended:
        from llm42.session import direct
        send=direct.DirectDrive._send
        def _send(self, window):
            self.begun=False
            send(self, window)
        monkeypatch.setattr(direct.DirectDrive, "_send", _send)
    lab = replace(lab, mode="auto", decide=lambda *_: "direct", parts=lab.parts)
    v = Dies(lab.verifier().start())
    generator = lab.generator(lab.engine(), v, commit_deadline_s=0.05)
    c=generator.metrics=Counts()
    prompts=Costs(((1.0,0.001),), 1e-2)
    lo=VerifierLoad(prompts, prompts, 4, 0, 128, 10**6, 10**6)
    generator.ways.load=lambda *_: Load(0,0,False,4,FAST,lo,True,"direct")
    requests=[request_of(f"k{i}", i, max_tokens=40) for i in range(4)]
    a=together(generator, requests)
    assert lab.wrong(a, requests)==[]
    length=len(requests[0].prompt)+4
    print("mended" if mended else "as it is", "changes", c.found[m.WAY_CHANGES], "stopped", v.stopped, "prompts take", 4*length*1e-2)
