"""How the plugin changes vLLM from outside, which versions fit, and where these differ."""
