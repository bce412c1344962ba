"""A model of the store in plain Python, and the rules by which Hypothesis plays clients, beats and workers at both.

`model`, `plan`, `breaker` and `world` are the model: written after the design, they import nothing of the package. The other
modules are the rules, each of which does one thing to the store and to the model; `machine` compares the two after every step.
"""
