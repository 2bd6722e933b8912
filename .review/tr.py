import sys
exec(open("/tmp/rev12/h.py").read().split("for k in")[0])
from llm42.session.policy import costs
n,a,more=C[sys.argv[1]]
c=Cluster(mode="auto",seed=1,**more); s=src(*a); w=0
for e in range(4,120,4):
    c.run(float(e),s,n); l=c.load(); k=costs(c._progress(Job(True,c.prompt,c.typical),None),l); st=c.standing
    print(e,c.plan,c.moves,c.tokens-w,{x:round(y,2) for x,y in k.items()},"b",l.best_effort,"d",l.deterministic,"p %.1f"%l.prompts,"meas",st._measured,st._tried,"until %.0f"%st._until,"row %.1e"%l.fast.row_s); w=c.tokens
