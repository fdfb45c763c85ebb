"""The front end's side: requests are checked before anything is scheduled."""
