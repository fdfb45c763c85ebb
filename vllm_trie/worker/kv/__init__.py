"""What forks of beams copy of the KV cache, and of all else that lies by block or by token."""
