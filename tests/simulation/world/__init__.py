"""The simulated world: time, processes, broker, database, clients, and the code of an application."""
