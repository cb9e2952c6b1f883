"""The foundation that `gradcheck`, `kernelcheck` and `paritycheck` share."""
