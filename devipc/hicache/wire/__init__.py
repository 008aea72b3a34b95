"""What passes between a client, the supervisor and an engine process: frames, rings, and words that they share.

Owns forms and their refusal; who is behind an end is not known here.
"""
