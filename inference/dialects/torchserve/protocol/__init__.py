"""Messages generated from TorchServe's protocol; `make protocol` writes them."""
