"""Gates: conditions that a request waits for besides its turn, such as an adapter or a grammar. One file each."""
