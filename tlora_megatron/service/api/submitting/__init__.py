"""Jobs that come over the network: their documents, what these may name, and their submit."""
