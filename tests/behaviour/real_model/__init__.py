"""SmolLM2-135M-Instruct: that what holds for small models holds for one that people use."""
