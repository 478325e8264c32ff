"""The C++ and CUDA sources, and the extension's builder."""
