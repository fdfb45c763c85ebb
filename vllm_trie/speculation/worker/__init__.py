"""The worker's side of speculation: where drafts come from, and how forests grow and are verified."""
