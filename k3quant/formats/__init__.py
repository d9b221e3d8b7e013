"""Number formats: encode, decode, error bounds. No tensor names, no input or output."""
