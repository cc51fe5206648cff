"""What compiled code is made with: numba's options and cache, generated source, and small functions kernels share."""
