"""The sequence coroutine runtime of one process; it imports no Ray."""
