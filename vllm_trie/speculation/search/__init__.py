"""The laws of speculation: forests, how large they are, and which drafts are accepted. Knows nothing of vLLM."""
