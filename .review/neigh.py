from llm42.step_times import StepTimes, Neighbour
now=[100.0]; clock=lambda: now[0]
# as Outboxes._beside: after a rest of 2 s the replica's series has another name: a new Neighbour, which begins with all that was computed
t=StepTimes(clock); boxes={}
def beside(name, worked):
    if name not in boxes:
        boxes[name]=Neighbour(clock); ns=tuple(boxes.values()); t.neighbour=lambda: sum(n.seconds for n in ns)
    boxes[name].tell(worked)
for series in range(12):
    beside(f"r-{series}", 5000.0)           # the engine is idle all the time
    for _ in range(1): 
        now[0]+=0.2; t.add(4, 0, 0.01)
    now[0]+=3.0
print("steps of 10 ms beside an idle engine are measured as", [round(s[2]*1e3,1) for s in t._sizes[3]], "ms")
