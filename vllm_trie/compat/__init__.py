"""vLLM from outside: what of it is changed, which versions fit, and where these differ."""
