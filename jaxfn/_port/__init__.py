"""The port: torch code rewritten for JAX, and the comparison of whole models and training jobs with torch's.

A separate product: no converted Function runs it, and nothing imports it before a user asks for it. ARCHITECTURE.md
says what it may import.
"""
