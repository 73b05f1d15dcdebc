"""What is the CPU's own: layers, forward pass, attention, KV cache and the kernels behind them."""
