"""One step of the search on the device: from the logits of a batch to the next beams of its groups."""
