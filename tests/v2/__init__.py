"""The V2 model runner and async scheduling, on a CPU by Triton's interpreter."""
