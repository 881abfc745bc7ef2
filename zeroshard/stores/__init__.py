"""The places of values that are not on the device: host memory and files."""
