from dataclasses import replace
from llm42.protocol import Request, SamplingParams
from llm42.session.ways import may_move
from llm42.engine.vllm.sampling import arguments_of
r=Request("r",(1,2,3),100,SamplingParams(temperature=1.0,presence_penalty=1.5,frequency_penalty=1.0),seeded=False)
print("may move", may_move(r))
back=replace(r,output=(7,)*40)   # what _submit sends after 40 tokens from a verifier
print({k:v for k,v in arguments_of(back,len(back.output)).items() if "penalty" in k or k=="max_tokens"}, "prompt given to vLLM:", len([*back.prompt,*back.output]), "tokens, output: 0")
