"""Every field of the requests that the edge forwards: honoured, translated or refused by name."""
