# plan correction by measured rates? quick look at moves with prompts counted
exec(open("/tmp/rev12/sim.py").read().split("cases = {")[0])
from llm42.session import policy
import tests.support.simulated_cluster as sc
from dataclasses import replace
CUR=[None]
old=policy.moves
def moves(typical, load):
    """With the prompts of those who would move: what a request of each class brings, per its typical output."""
    if not old(typical, load): return False
    c=CUR[0]; e=[j for j in c.ended if not j.deterministic][-64:]
    if not e: return False
    p=sum(j.prompt for j in e)/sum(j.output for j in e)      # prompt rows per token of best effort
    v=load.verifier; share=load.movable/(load.movable+load.deterministic)
    stays=min(policy.round_s(typical, replace(load,moves=False), w) for w in policy.WAYS)
    moved=policy.round_s(typical, replace(load,moves=True),"direct")
    n=load.best_effort+load.deterministic
    rows=load.movable*p                                       # of a round
    stays+= rows*load.prompt_row_s if load.one_device else 0; moved+= rows*v.prompt_row_s
    return moved < stays*(1-(0 if load.moves else policy.MOVE_MARGIN))
sc.moves=moves
for label,n,a,more in (("two devices 8k/64 half",64,(0.5,256,256,8000,64),{"devices":2}),("16k/32 20%",64,(0.2,256,256,16000,32),{}),("2k/128 half",64,(0.5,256,256,2000,128),{}),("256/256 half",64,(0.5,256,256,256,256),{})):
    for seed in (1,2):
        c=Cluster(mode="auto",movable=True,seed=seed,**more); CUR[0]=c; s=src(*a,seed=seed); c.run(40.0,s,n); t,t0=c.tokens,c.now; c.run(120.0,s,n)
        print(label,seed,"prompts counted:",round((c.tokens-t)/(c.now-t0)),c.plan,c.moves,flush=True)
