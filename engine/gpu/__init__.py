"""The engine on CUDA devices, in torch and Triton alone. Imported only where a device, or Triton's interpreter, is used."""
