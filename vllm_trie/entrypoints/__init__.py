"""The front end's side: requests, which are checked before an engine sees them, and its answers."""
