"""Search by steps, in the front end: draws candidates as ordinary requests, and asks the scorer for their numbers.

Which of them go on is decided in `search.step_search`.
"""
