"""What a request may have to wait for beside its turn: a file for each."""
