"""Generated messages of MindIE's calls between prefill and decode instances (`make protocol`)."""
