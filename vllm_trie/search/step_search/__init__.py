"""Search by steps, as rules alone: `search.py` begins. Whoever runs it draws the candidates and asks the scorer."""
