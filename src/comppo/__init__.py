"""Computation-conditioned credit transport for LLM reinforcement learning."""
