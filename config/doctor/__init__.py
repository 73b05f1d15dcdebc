"""`doctor`: checks what a server needs before it starts. Each check is a function; nothing is bound, started or changed."""
