"""Agents: programs that lead conversations with the run's model over OpenAI's API."""
