"""KV offload: full blocks of the prefix cache also go to host memory or to disk, and come back when a prompt needs them."""
