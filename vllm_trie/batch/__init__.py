"""A batch job: prompts in a file, hypotheses in another, engines on Ray in between."""
