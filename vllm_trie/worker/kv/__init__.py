"""What forking beams copy of the KV cache, and of everything else that is stored by block or by token."""
