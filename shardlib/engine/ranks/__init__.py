"""Messages between ranks: collectives, what they agree on, and which of them is lost."""
