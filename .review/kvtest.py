# the same patience-less measure of the KV wave: several replicas decide at once; and the fresh queue
from llm42.verifier.followers import Followers
import inspect
from llm42.verifier import admission
print(inspect.getsource(admission.Admission._admitted).count("return False"))
