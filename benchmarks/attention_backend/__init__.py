"""The verifier's attention inside vLLM, through vLLM's registry of backends: is vLLM as fast with it?"""
