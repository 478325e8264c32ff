"""The C++ and CUDA sources, and the builder of the extension. It knows no operator."""
