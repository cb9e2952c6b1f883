"""The foundation of `gradcheck`, `kernelcheck` and `paritycheck`: random arrays, and how close is close."""
