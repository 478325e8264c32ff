"""The C++ and CUDA sources, and what builds and opens the extension. It knows no operator."""
