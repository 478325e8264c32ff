"""The C++ half: operator schemas, the extension's builder and loader, and the C++ and CUDA sources themselves."""
