"""What `gradcheck`, `kernelcheck` and `paritycheck` share."""
