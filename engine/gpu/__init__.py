"""The engine on CUDA devices, in torch and Triton. Imported only if a CUDA device or Triton's interpreter is used."""
