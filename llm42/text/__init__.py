"""Token ids to text and back; what a model's files say about that."""
