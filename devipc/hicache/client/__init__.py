"""The scheduler's side: attachments to an engine, tickets, and the tables that answers are found by.

Owns what a client must remember when its engine dies.
"""
