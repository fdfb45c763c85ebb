"""Search by steps, in the front end: draws candidates as ordinary requests, asks the scorer, says which go on."""
