"""What must hold: checks of every commit against how the tables were, by code that shares nothing with the protocol."""
