"""The scheduler's side of speculation: how much each group may draft in a step."""
