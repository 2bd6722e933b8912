"""OpenAI's HTTP dialect as a plain FastAPI application; it knows nothing of Ray."""
