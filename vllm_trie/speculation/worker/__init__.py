"""The worker's side of speculation: where drafts come from, and how their forests grow and are verified."""
