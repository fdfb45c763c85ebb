"""The rules of speculation: forests, their sizes, and which drafts are accepted. Independent of vLLM."""
